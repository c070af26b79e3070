"""Multi-head retention: the layer that stands where a ViT has self-attention."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from vir import ops
from vir.layers.norm import HeadsNorm
from vir.layers.patches import Grid
from vir.layers.residual import plus, plus_normed, scaled_linear
from vir.ops.checks import check_chunk, check_form
from vir.ops.decay import DecayKind

Retention = Literal["1d", "2d"]
FORMS = {"1d": ops.FORMS_1D, "2d": ops.FORMS_2D}

_KEPT: dict[tuple[int, DecayKind, float, torch.device], Tensor] = {}


def _kept_decay(heads: int, kind: DecayKind, stretch: float, device: torch.device) -> Tensor:
    """Made once: not what a recording CUDA graph would make, which is not real before it is replayed."""
    key = heads, kind, stretch, device
    if key not in _KEPT:
        with torch.inference_mode(False):
            made = ops.decay(heads, kind, device=device) ** stretch
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return made
        _KEPT[key] = made
    return _KEPT[key]


class _Given:
    """Decays as attributes: a compiler takes such a tensor as an input, where it would else make it in every layer."""


_GIVEN = _Given()


@torch.compiler.assume_constant_result
def _given(heads: int, kind: DecayKind, device: torch.device) -> str:
    """The name of the attribute that holds this decay from now on."""
    name = f"{kind}_{heads}_{device.type}_{device.index or 0}"
    setattr(_GIVEN, name, _kept_decay(heads, kind, 1.0, device))
    return name


def _decay_for(x: Tensor, heads: int, kind: DecayKind, stretch: float) -> Tensor:
    """The decay on x's device; where x is only traced, as operations."""
    if type(x) is not Tensor:
        return ops.decay(heads, kind, device=x.device) ** stretch
    if torch.compiler.is_compiling():
        gamma = getattr(_GIVEN, _given(heads, kind, x.device))
        return gamma if stretch == 1.0 else gamma**stretch
    return _kept_decay(heads, kind, stretch, x.device)


def _of_sums(q: Tensor) -> torch.dtype:
    """In fp16 a sum over thousands of tokens can leave its range before the norm."""
    return torch.float32 if q.dtype == torch.float16 else q.dtype


@register_notrace_module
class MultiHeadRetention(nn.Module):
    """MHR(z) = W_o LN([Ret_1(z); ...; Ret_h(z)]), each head with its own constant decay.

    The decay is a function of the number of heads, not a buffer: `model.bfloat16()` would round 0.998 to 1.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        retention: Retention = "1d",
        *,
        gated: bool = False,
        scaled: Literal["query", "key"] = "query",
        decay: DecayKind = "log",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if retention not in FORMS:
            raise ValueError(f"retention={retention!r}, expected '1d' or '2d'.")
        if dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}: choose heads that divide it.")
        self.heads = heads
        self.retention = retention
        self.scaled = scaled
        self.decay = decay
        self.stretch = 1.0
        self.form: ops.Form = "auto"
        self.chunk: int | None = None
        self.qkv = nn.Linear(dim, 3 * dim, device=device, dtype=dtype)
        self.gate = nn.Linear(dim, dim, device=device, dtype=dtype) if gated else None
        self.norm = HeadsNorm(dim, eps=1e-6, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)

    def set_form(self, form: ops.Form, chunk: int | None = None) -> None:
        """Choose how retention is computed; the numbers stay the same."""
        check_form(f"set_form (retention {self.retention})", form, FORMS[self.retention])
        check_chunk("set_form", chunk)
        self.form, self.chunk = form, chunk

    def forward(self, x: Tensor, grid: Grid, layer_scale: Tensor | None = None) -> Tensor:
        return self._joined(self._sums(x, grid), x, layer_scale)

    def onto(self, tokens: Tensor, x: Tensor, grid: Grid, layer_scale: Tensor | None) -> Tensor:
        """tokens + scale * forward(x), in fewer passes where there are many tokens; without gradients."""
        if self.gate is not None:
            return plus(tokens, self.forward(x, grid), layer_scale)
        return plus_normed(tokens, self._sums(x, grid).flatten(2), self.norm, self.proj, layer_scale)

    def _sums(self, x: Tensor, grid: Grid) -> Tensor:
        """Of each head, `b n h d`."""
        q, k, v, scale = self._heads_of(x)
        how: dict[str, Any] = {"form": self.form, "chunk": self.chunk, "scale": scale, "dtype": _of_sums(q)}
        gamma = _decay_for(x, self.heads, self.decay, self.stretch)
        if self.retention == "1d":
            return ops.retention_1d(q, k, v, gamma, **how)
        return ops.retention_2d(q, k, v, gamma, grid, **how)

    def stream(self, x: Tensor, cols: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """As forward, of an image that comes in bands of whole rows: from the state above them to that below."""
        q, k, v, scale = self._heads_of(x)
        how: dict[str, Any] = {"chunk": self.chunk, "scale": scale, "dtype": _of_sums(q)}
        gamma = _decay_for(x, self.heads, self.decay, self.stretch)
        if self.retention == "1d":
            out, state = ops.retention_1d_stream(q, k, v, gamma, state, **how)
        else:
            out, state = ops.retention_2d_stream(q, k, v, gamma, cols, state, **how)
        return self._joined(out, x, None), state

    def _heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, float | None]:
        """q, k, v as `b n h d`, and the scale of the query where it is not the usual one."""
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1).unbind(2)
        if self.scaled == "key":
            return q, k * k.shape[-1] ** -0.5, v, 1.0
        return q, k, v, None

    def _joined(self, out: Tensor, x: Tensor, layer_scale: Tensor | None) -> Tensor:
        out = self.norm(out.flatten(2))
        if out.dtype != x.dtype:
            out = out.to(x.dtype)
        if self.gate is not None:
            out = F.silu(self.gate(x)) * out
        return scaled_linear(self.proj, out, layer_scale)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, retention={self.retention}, form={self.form}, chunk={self.chunk}"


def set_form(model: nn.Module, form: ops.Form, chunk: int | None = None) -> None:
    """Set the form of every retention layer of a model."""
    for module in model.modules():
        if isinstance(module, MultiHeadRetention):
            module.set_form(form, chunk)


def stretch_decay(model: nn.Module, power: float) -> None:
    """Raise every decay to this power: old / new patches of a side keep what a head sees, in pixels."""
    if not 0 < power <= 16:
        raise ValueError(f"stretch_decay: power={power}, expected a number above 0 and at most 16; 1 is as trained.")
    for module in model.modules():
        if isinstance(module, MultiHeadRetention):
            module.stretch = power
