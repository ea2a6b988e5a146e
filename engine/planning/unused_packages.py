"""Packages that libraries import wherever they are installed, though a run's config asks nothing of them.

PEFT imports bitsandbytes, TRL imports wandb, transformers imports SciPy and torchao, each for what other runs do; together
that is a third of a worker's start. `withhold` has this process do without them, as on a machine where they are not
installed: every library asks first, and its answer is the same for the whole life of the process. People's own functions
run in another process and see all that is installed. No torch is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import cast

from engine.config.optimizers import KINDS
from engine.config.reward_specs import reward_specs
from engine.config.tree import RunConfig
from engine.facts.model_shape import model_facts
from engine.facts.stored import PACKED

NEVER = ("weave", "deepspeed", "vllm")
"""Packages of which no run here asks anything."""
OF_TRACKERS = {
    "wandb": ("wandb",),
    "mlflow": ("scipy", "sklearn"),
    "trackio": ("scipy", "sklearn"),
    "comet": ("comet_ml",),
}
"""Packages that a tracker may import, and nothing else here."""


def unused(config: RunConfig) -> tuple[str, ...]:
    """The packages, installed or not, that a run of this config has no use for."""
    asked = {name for tracker, names in OF_TRACKERS.items() if tracker in config.run.report_to for name in names}
    names = [*NEVER, *({name for names in OF_TRACKERS.values() for name in names} - asked)]
    if _plain_numbers(config):
        if (
            config.model.quantization in ("none", "fp8", "mxfp4", "nvfp4")
            and KINDS[config.optim.optim].package != "bitsandbytes"
        ):
            names.append("bitsandbytes")
        if config.kernels.quantization_aware is False:
            names.append("torchao")
    return tuple(names)


def withhold(names: Iterable[str]) -> None:
    """Has this process do without the packages, but for those that it has imported already.

    An entry of None in `sys.modules` is Python's own way: an import raises ModuleNotFoundError, `find_spec` finds nothing.
    """
    for name in names:
        sys.modules.setdefault(name, cast(ModuleType, None))


def _plain_numbers(config: RunConfig) -> bool:
    """Whether the files of every model that the run loads are known to hold no weights of another package's format."""
    named = [(config.model.name, config.model.revision)]
    specs = reward_specs(getattr(config.method, "reward_funcs", ()))
    named += [(spec.argument, None) for spec in specs if spec.kind == "model"]
    known = [model_facts(name, revision) for name, revision in named]
    return all(
        facts is not None and not (facts.remote or facts.missing) and facts.stored in ("", "fp8", "mxfp4", *PACKED)
        for facts in known
    )
