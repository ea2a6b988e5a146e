"""Settings that the schema knows and this version does not do: each refused by a row of its own, never ignored."""

from __future__ import annotations

from engine.config.rule import Refused, leave_out, one_of, refused
from engine.config.tree import fields

refused(
    __name__,
    Refused(
        "mlx-is-not-a-backend-here",
        fields.run.backend,
        one_of("mlx"),
        "torch in this version",
        "MLX trains on Apple chips with a library of its own; here torch does, also on a Mac's CPU.",
        leave_out(fields.run.backend),
    ),
    Refused(
        "unsloth-is-not-a-backend-here",
        fields.run.backend,
        one_of("unsloth"),
        "torch in this version",
        "Unsloth rewrites the libraries that this workbench trains with, so the two cannot run in one process.",
        leave_out(fields.run.backend),
    ),
)
