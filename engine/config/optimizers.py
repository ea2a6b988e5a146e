"""What each optimizer is: its package, which of Adam's settings it uses, and the settings that are its own.

One table, from which follow the keys of `optim.optim_args` with their bounds, the rules about packages and settings that
do nothing, the reference page, the JSON schema and the arguments that an optimizer is built with. How many bytes its
states take is arithmetic over shapes and stands in `engine.planning.memory_model`.
"""

from __future__ import annotations

from typing import Any

_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_BETAS = ("adam_beta1", "adam_beta2")


class Own:
    """A setting of one optimizer: a number within bounds (whole where they are), or one of some words."""

    def __init__(self, default: Any, least: float | None, most: float | None, text: str, words: tuple[Any, ...] = ()):
        self.default, self.least, self.most, self.text, self.words = default, least, most, text, words

    def fits(self, value: Any) -> bool:
        """Whether the value is of this kind and within the bounds."""
        if self.words:
            return not isinstance(value, bool) and value in self.words
        kinds = (int,) if self.whole else (int, float)
        return (
            isinstance(value, kinds)
            and not isinstance(value, bool)
            and (self.least is None or self.least <= value)
            and (self.most is None or value <= self.most)
        )

    @property
    def whole(self) -> bool:
        """Whether it counts something."""
        return isinstance(self.least, int)

    @property
    def takes(self) -> str:
        """What it takes, in words."""
        if self.words:
            return " or ".join(str(word) for word in self.words)
        return (
            f"a {'whole ' if self.whole else ''}number from {self.least:{_shape(self)}} to {self.most:{_shape(self)}}"
        )

    def as_json_schema(self) -> dict[str, Any]:
        """The same for editors."""
        if self.words:
            kind: dict[str, Any] = {"enum": list(self.words)}
        else:
            kind = {"type": "integer" if self.whole else "number", "minimum": self.least, "maximum": self.most}
        return {**kind, "default": self.default, "description": self.text}


def _shape(own: Own) -> str:
    return "," if own.whole else "g"


class Kind:
    """One optimizer: the package it comes from (empty: torch or transformers), and the settings it listens to."""

    def __init__(self, package: str = "", adam: tuple[str, ...] = (), own: dict[str, Own] | None = None):
        self.package, self.adam, self.own = package, adam, own or {}


_ADEMAMIX = {
    "alpha": Own(5.0, 0.0, 100.0, "the weight of its slow memory"),
    "beta3": Own(0.9999, 0.0, 0.999999, "how long that memory lasts"),
    "t_alpha": Own(None, 1, 10**9, "steps over which alpha reaches its value"),
    "t_beta3": Own(None, 1, 10**9, "steps over which beta3 reaches its value"),
}
_MATCH = "match_rms_adamw"
_MUON = {
    "momentum": Own(0.95, 0.0, 0.9999, "how long the direction of past gradients is remembered"),
    "ns_steps": Own(5, 1, 20, "Newton-Schulz steps that make the update orthogonal"),
    "adjust_lr_fn": Own(
        _MATCH, None, None,
        "how the rate follows a weight's shape: match_rms_adamw gives steps as long as AdamW's, so that its rates serve "
        "(arXiv:2502.16982); original is the first form, for rates of its own",
        words=(_MATCH, "original"),
    ),
}  # fmt: skip
_DION = {
    "momentum": _MUON["momentum"],
    "rank_fraction": Own(0.25, 0.01, 1.0, "rank of a step, as a share of the weight's shorter side"),
    "adjust_lr_fn": Own(
        _MATCH, None, None,
        "how the rate follows a weight's shape: match_rms_adamw as for Muon; original by the root of rows over columns, "
        "for rates of its own",
        words=(_MATCH, "original"),
    ),
}  # fmt: skip
_GALORE = {
    "rank": Own(128, 1, 65_536, "directions of a gradient that are kept"),
    "update_proj_gap": Own(200, 1, 1_000_000, "steps after which they are chosen anew"),
    "scale": Own(0.25, 0.001, 100.0, "what the projected layers' steps are multiplied by"),
}
_PROJECTION = Own(
    "std", None, None,
    "the side that is projected: std the longer, reverse_std the shorter, right the columns, left the rows, full both",
    words=("std", "reverse_std", "right", "left", "full"),
)  # fmt: skip
_Q_GALORE = {
    "proj_bits": Own(4, None, None, "bits a number of the projection", words=(4, 8)),
    "cos_threshold": Own(0.4, 0.0, 1.0, "a layer whose first direction stays as alike as this waits longer"),
    "gamma_proj": Own(2.0, 1.0, 100.0, "times as long each time"),
    "queue_size": Own(5, 1, 1_000, "choices that the likeness is averaged over"),
}

KINDS: dict[str, Kind] = {
    "adamw_torch_fused": Kind(adam=_ADAM),
    "adamw_torch": Kind(adam=_ADAM),
    "adafactor": Kind(),
    "sgd": Kind(),
    "adagrad": Kind(),
    "rmsprop": Kind(),
    "adamw_8bit": Kind("bitsandbytes", _ADAM),
    "paged_adamw_8bit": Kind("bitsandbytes", _ADAM),
    "lion_32bit": Kind("bitsandbytes", _BETAS),
    "lion_8bit": Kind("bitsandbytes", _BETAS),
    "ademamix": Kind("bitsandbytes", _ADAM, _ADEMAMIX),
    "ademamix_8bit": Kind("bitsandbytes", _ADAM, _ADEMAMIX),
    "muon": Kind("", _ADAM, _MUON),
    "adopt": Kind(
        "pytorch-optimizer",
        ("adam_beta1",),
        {
            "beta2": Own(0.9999, 0.0, 0.999999, "how long it remembers the size of past gradients"),
            "eps": Own(1e-6, 1e-12, 1.0, "a small number that keeps it from dividing by 0"),
        },
    ),
    "came": Kind(
        "pytorch-optimizer",
        _BETAS,
        {
            "beta3": Own(0.9999, 0.0, 0.999999, "how long it remembers how far updates strayed from their average"),
            "clip_threshold": Own(1.0, 0.01, 100.0, "root mean square that no update exceeds"),
        },
    ),
    "flash_adamw": Kind("pytorch-optimizer", _ADAM),
    "schedule_free_adamw": Kind(
        "schedulefree",
        _ADAM,
        {
            "r": Own(0.0, 0.0, 10.0, "power of the step by which later weights count more in the average"),
        },
    ),
    "dion": Kind("", _ADAM, _DION),
    "galore_adamw": Kind("pytorch-optimizer", _ADAM, {**_GALORE, "proj_type": _PROJECTION}),
    "q_galore_adamw_8bit": Kind("bitsandbytes", _ADAM, {**_GALORE, **_Q_GALORE}),
}
"""Optimizer -> what it is."""

PROJECTED = frozenset({"galore_adamw", "q_galore_adamw_8bit"})
"""Those that project the gradients of the layers that `optim.optim_target_modules` names."""
MATRICES_ONLY = frozenset({"muon", "dion"})
"""Those that move the matrices inside the layers, and leave every other weight to AdamW."""
BUILT_HERE = frozenset({"adopt", "came", "flash_adamw", "schedule_free_adamw"}) | MATRICES_ONLY | PROJECTED
"""Those that `engine.trainers.optimizers` builds; the others are transformers' own."""


def own_value(name: str, args: dict[str, Any], key: str) -> Any:
    """The value of an optimizer's own setting: as given, or its default."""
    return args.get(key, KINDS[name].own[key].default)
