"""`memory.fp32_norms`: normalisation layers hold their weights in float32 and compute there."""

from __future__ import annotations

from engine.config.rule import Refused, leave_out, one_of, refused
from engine.config.tree import fields

SETTING = fields.memory.fp32_norms
AFTER = ()

refused(
    __name__,
    Refused(
        "fp32-norms-stand-between-fewer-bits",
        SETTING,
        bool,
        "false with dtype float32",
        "All weights are float32 then, those of norms too.",
        leave_out(SETTING),
        beside={fields.model.dtype: one_of("float32")},
    ),
)
