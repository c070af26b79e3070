"""What the kernels share: powers of the decay, tiles of tokens, products."""

import triton
import triton.language as tl


@triton.jit
def log2_decay(gamma_ptr, head):
    """log2 of a head's gamma, to float32's precision, because it is multiplied by thousands of steps.

    The GPU's own log2 is off by 2^-22 near 1, where gammas are: there the series of the inverse hyperbolic tangent.
    """
    gamma = tl.load(gamma_ptr + head).to(tl.float32)
    z = (gamma - 1.0) / (gamma + 1.0)
    zz = z * z
    series = 1.0 / 11 + zz * (1.0 / 13 + zz * (1.0 / 15))
    series = 1.0 + zz * (1.0 / 3 + zz * (1.0 / 5 + zz * (1.0 / 7 + zz * (1.0 / 9 + zz * series))))
    near_one = z * series * 2.8853900817779268  # 2 / ln 2
    log2 = tl.where(gamma > 0.5, near_one, tl.log2(gamma))
    # gamma 0 forgets at once, without 0 * inf; what is no decay gives no number.
    return tl.maximum(log2, -1000.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def power(log2_gamma, steps):
    return tl.exp2(tl.cast(steps, tl.float32) * log2_gamma)


@triton.jit
def fading(lg, steps):
    """gamma^steps, and nothing of what lies ahead."""
    return tl.where(steps >= 0, power(lg, tl.maximum(steps, 0)), 0.0)


@triton.jit
def first_of(batch, head, stride_b, stride_h, ALIGN: tl.constexpr):
    """Where a head begins; ALIGN is what its stride is known to be a multiple of, so that loads are wide."""
    return batch * stride_b + tl.multiple_of(tl.cast(head, tl.int64) * stride_h, ALIGN)


@triton.jit
def within(dims, D: tl.constexpr):
    """Which channels of a block are of its head."""
    return (dims >= 0) & (dims < D)


@triton.jit
def load_rows(ptr, offsets, ok, dims, D: tl.constexpr, OPERAND: tl.constexpr):
    """Rows of a tile, zero where there is no token or no channel."""
    mask = ok[:, None] if dims.shape[0] == D else ok[:, None] & within(dims, D)[None, :]
    return tl.load(ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0).to(OPERAND)


@triton.jit
def store_rows(ptr, offsets, ok, dims, D: tl.constexpr, rows):
    mask = ok[:, None] if dims.shape[0] == D else ok[:, None] & within(dims, D)[None, :]
    tl.store(ptr + offsets[:, None] + dims[None, :], rows.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def state_offsets(dims_k, dims_v, stride_k, stride_v):
    return dims_k[:, None] * stride_k + dims_v[None, :] * stride_v


@triton.jit
def state_mask(dims_k, dims_v, DK: tl.constexpr, DV: tl.constexpr):
    return within(dims_k, DK)[:, None] & within(dims_v, DV)[None, :]


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def operand(x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Round a float32 result to what goes into the next product; for tf32 by hand, because the GPU would truncate."""
    if tl.float32 == OPERAND and PRECISION == "tf32":
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)  # all bits of NaN but the sign may be set: rounded up, that would be zero
    return x.to(OPERAND)


@triton.jit
def scaled(rows, factors, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    return operand(rows.to(tl.float32) * factors[:, None], OPERAND, PRECISION)
