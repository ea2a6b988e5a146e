"""What reaches the libraries' arguments: switches that they know, and nothing of our own tiers and places."""

from __future__ import annotations

import pytest

from engine.planning.auto import resolved
from engine.rules import read
from engine.trainers.table import METHODS, method

TIERS = {False: False, True: True, "selective": True, "medium": True, "full": True}


@pytest.mark.parametrize("kind", METHODS)
def test_tiers_and_offloading_are_ours_and_reach_the_library_as_a_switch(kind, tmp_path):
    for tier, switch in TIERS.items():
        mapping = {
            "model": {"name": "builtin/tiny", "dtype": "float32"},
            "data": {"train": [{"path": "rows.jsonl"}]},
            "method": {"kind": kind},
            "optim": {"per_device_train_batch_size": 8},
            "memory": {"gradient_checkpointing": tier, "activation_offloading": "disk"},
        }
        made = method(kind).arguments(resolved(read(mapping).config), tmp_path)
        assert made.gradient_checkpointing is switch
        assert (made.gradient_checkpointing_kwargs or {}).keys() <= {"use_reentrant"}
        assert not getattr(made, "activation_offloading", False)  # TRL's own, which would move them a second time
