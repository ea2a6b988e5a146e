"""What an adapter's own folder says of it, in the place of settings: a run that goes on from an adapter has its shape.

An adapter's matrices fix its rank and the layers that it acts on, and its numbers mean what they do under its alpha alone. So
what a person leaves open follows from the folder, wherever a config is read beside facts; what was written stays as it is, for
a rule to compare.
"""

from __future__ import annotations

import copy
from typing import Any

from engine.config.facts import AdapterFacts, Facts
from engine.config.tree import FieldSpec, RunConfig, fields

OF_THE_FOLDER = (
    fields.adapter.r, fields.adapter.lora_alpha, fields.adapter.target_modules, fields.adapter.target_parameters,
    fields.adapter.modules_to_save, fields.adapter.use_rslora, fields.adapter.use_dora, fields.adapter.bias,
)  # fmt: skip
"""The settings that say what an adapter is. Dropout and the format of its numbers are a matter of the training."""


def adapter_of(config: RunConfig, facts: Facts) -> AdapterFacts | None:
    """What is known of the adapter that the config goes on from; None where there is none or it was not looked at."""
    known, adapter = facts.adapter, config.adapter
    if adapter.kind != "lora" or known is None or not adapter.path or known.path != adapter.path:
        return None
    return known


def taken_over(config: RunConfig, facts: Facts) -> RunConfig:
    """The config with what the adapter's folder says, but where it says itself what the adapter is."""
    known = adapter_of(config, facts)
    values = {} if known is None or known.problem else open_settings(known, facts)
    return config.with_values(values) if values else config


def open_settings(known: AdapterFacts, facts: Facts) -> dict[FieldSpec, Any]:
    """By setting, what the folder says where the person does not."""
    return {
        spec: copy.copy(known.settings[spec.name])
        for spec in OF_THE_FOLDER
        if spec.name in known.settings and spec.path not in facts.given
    }
