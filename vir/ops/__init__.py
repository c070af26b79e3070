"""Retention as pure functions of tensors: no modules, no parameters."""

from vir.ops.decay import decay, mask_1d, mask_2d
from vir.ops.dispatch import FORMS_1D, FORMS_2D, Form, Plan, plan_1d, plan_2d
from vir.ops.retention import retention_1d, retention_1d_stream, retention_2d, retention_2d_stream

__all__ = [
    "FORMS_1D",
    "FORMS_2D",
    "Form",
    "Plan",
    "decay",
    "mask_1d",
    "mask_2d",
    "plan_1d",
    "plan_2d",
    "retention_1d",
    "retention_1d_stream",
    "retention_2d",
    "retention_2d_stream",
]
