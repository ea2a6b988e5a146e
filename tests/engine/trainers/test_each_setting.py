"""Each optimizer and each schedule listens to its own settings, and held-out rows and epochs are counted as asked.

That no setting is without effect in any method is for `test_settings_in_methods`.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from engine.config.facts import Facts
from engine.config.files import put
from engine.config.optimizers import KINDS
from engine.config.schedules import SCHEDULES
from engine.rules import read
from tests.engine.trainers.conftest import BASE, CONVERSATIONS
from tests.engine.trainers.test_matrix import CPU, settings


def weights_after(train, mapping):
    """The weights of the run's last checkpoint; no rule has anything against its config."""
    nested: dict = {"version": 1}
    for path, value in (BASE | mapping).items():
        put(nested, path, value)
    errors = [found.message for found in read(nested, Facts(machine=CPU)).findings if found.severity == "error"]
    assert not errors, errors
    run = train(mapping)
    last = max(run.checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return load_file(next(last.glob("*model.safetensors")))


def differ(one, other):
    return one.keys() != other.keys() or any(
        one[name].shape != other[name].shape or not torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("paged")])
def test_each_optimizer_listens_to_every_setting_that_no_rule_refuses_with_it(train, source, name):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("pytorch_optimizer")
    pytest.importorskip("schedulefree")
    base = {**settings(source, "sft", "none"), "optim.max_steps": 4, "optim.optim": name, "optim.max_grad_norm": 1e6}
    base |= {"optim.optim_args": {"rank": 8}} if "galore" in name else {}
    base |= {"optim.lr_scheduler_type": "constant"} if name == "schedule_free_adamw" else {}
    plain = weights_after(train, base)
    away = {"learning_rate": 5e-4, "weight_decay": 0.5, "max_grad_norm": 0.5}
    away |= {key: 0.1 if key == "adam_epsilon" else 0.5 for key in KINDS[name].adam}
    without = [
        key for key, value in away.items() if not differ(plain, weights_after(train, {**base, f"optim.{key}": value}))
    ]
    assert not without


@pytest.mark.slow
def test_each_schedule_is_none_of_the_others_and_listens_to_its_own_settings(train, source):
    base = {**settings(source, "sft", "none"), "optim.max_steps": 6, "run.save_steps": 6}
    own = {
        "cosine_with_restarts": [{"num_cycles": 2}, {"num_cycles": 3}],
        "polynomial": [{"power": 2.0}, {"power": 3.0}, {"power": 2.0, "lr_end": 1e-4}],
        "inverse_sqrt": [{}, {"timescale": 5}],
    }
    found = []
    for name in SCHEDULES:
        for kwargs in own.get(name, [{}]):
            warm = {"optim.warmup_steps": 2} if name == "constant_with_warmup" else {}
            given = {"optim.lr_scheduler_type": name, "optim.lr_scheduler_kwargs": kwargs, **warm}
            found.append(((name, kwargs), weights_after(train, {**base, **given})))
    same = [(one, other) for place, (one, a) in enumerate(found) for other, b in found[:place] if not differ(a, b)]
    assert len(found) == 11
    assert not same


def test_held_out_rows_and_epochs_are_counted_as_asked(train, source, monkeypatch):
    from transformers import Trainer

    seen, loader_of = [], Trainer.get_eval_dataloader

    def noted(self, *args, **kwargs):
        loader = loader_of(self, *args, **kwargs)
        seen.extend(len(batch["input_ids"]) for batch in loader)
        return loader

    monkeypatch.setattr(Trainer, "get_eval_dataloader", noted)
    base = {**settings(source, "sft", "none"), "data.train": [{"path": source(CONVERSATIONS[:8])}]}
    base |= {"data.eval": [{"path": source(CONVERSATIONS[:6])}], "optim.max_steps": None, "run.eval_steps": 3}
    run = train({**base, "optim.num_train_epochs": 1.5, "optim.per_device_eval_batch_size": 3})
    assert seen == [3, 3]
    assert sorted(int(path.name.rpartition("-")[2]) for path in run.checkpoints.glob("checkpoint-*"))[-1] == 3
