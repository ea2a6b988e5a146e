"""`num_experts` for configs that call it otherwise: losses that balance routers ask every mixture by that name.

TRL's head reads `config.num_experts`, which transformers maps to a family's own name in most configs and not in GraniteMoE's and
Phi-3.5-MoE's. The config of a loaded model gets a class with that name beside its own; what is written of it stays as it is.
"""

from __future__ import annotations

from typing import Any

_OWN_NAMES = ("n_routed_experts", "num_local_experts")
"""The first may stand for the second in a config, and one name is followed once."""


def name_experts(config: Any) -> None:
    """Has the config of a language model answer to `num_experts`, where it counts its experts by another name alone."""
    if hasattr(config, "num_experts"):
        return
    own = next((name for name in _OWN_NAMES if isinstance(getattr(config, name, None), int)), None)
    if own is not None:
        kind = type(config)
        named = {"attribute_map": {**kind.attribute_map, "num_experts": own}, "__module__": kind.__module__}
        config.__class__ = type(kind.__name__, (kind,), named)
