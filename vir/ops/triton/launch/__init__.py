"""From tensors to kernels: shapes, strides, memory for the results, and the order of launches."""

from vir.ops.triton.launch.lines import apply_states, line_states
from vir.ops.triton.launch.plans import INTERPRETED, forget
from vir.ops.triton.launch.tiles import grid, rows
from vir.ops.triton.launch.walks import walk, walk_back

__all__ = ["INTERPRETED", "apply_states", "forget", "grid", "line_states", "rows", "walk", "walk_back"]
