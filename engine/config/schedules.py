"""What each schedule of the learning rate has of its own: the keys of `optim.lr_scheduler_kwargs` with their bounds.

Names and defaults are transformers'. By those defaults two schedules are others under a second name, which a rule says:
`cosine_with_restarts` of one cycle is `cosine`, and `polynomial` of power 1 is `linear`.
"""

from __future__ import annotations

from engine.config.optimizers import Own

SCHEDULES: dict[str, dict[str, Own]] = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {
        "num_cycles": Own(1, 1, 1_000, "times that the rate falls to 0 from its full height; one is cosine"),
    },
    "polynomial": {
        "power": Own(1.0, 0.1, 10.0, "the power by which it falls: 1 is a line, above it falls early"),
        "lr_end": Own(1e-7, 0.0, 10.0, "the learning rate at the end"),
    },
    "inverse_sqrt": {
        "timescale": Own(
            None, 1, 10**9, "steps after which it has fallen to 0.7; the warm-up's, or 10,000 without one"
        ),
    },
    "constant": {},
    "constant_with_warmup": {},
}
"""Schedule -> its own settings."""
