"""What a failed run proposes is never what has just failed."""

from __future__ import annotations

import pytest

from engine.config.files import dump, parse
from engine.config.recipes import recipe_mapping
from engine.planning.auto import resolved
from engine.rules import read
from engine.run.proposals import after_divergence, after_out_of_memory, goes_on, propose, way_on
from engine.run.series import Series
from engine.run.view import RunView, fold


@pytest.fixture(scope="module")
def stored():
    """A config as a run keeps it, no `auto` left."""
    return parse(dump(resolved(read(recipe_mapping("demo")).config))).mapping


def stored_with(stored, **values):
    changed = {section: dict(found) if isinstance(found, dict) else found for section, found in stored.items()}
    for path, value in values.items():
        section, name = path.split("__")
        changed[section][name] = value
    return changed


def of(settings, kind, **more):
    change = propose(RunView(cause_kind=kind, **more), settings)
    return change and change.settings


def test_one_change_is_proposed_and_the_next_one_where_it_is_in_force_already(stored):
    hot = stored_with(stored, optim__learning_rate=10.0, optim__max_grad_norm=0.0)
    assert of(hot, "diverged") == {"optim.learning_rate": 2e-5, "optim.max_grad_norm": 1.0}
    assert of(stored_with(stored, optim__learning_rate=2e-5), "diverged") == {"optim.learning_rate": 2e-6}
    memory = {"optim__per_device_train_batch_size": 1, "memory__gradient_checkpointing": False}
    assert of(stored_with(stored, optim__per_device_train_batch_size=8), "cuda_oom") == {
        "optim.per_device_train_batch_size": 4,
        "optim.gradient_accumulation_steps": 2,
    }
    odd = stored_with(stored, optim__per_device_train_batch_size=7, optim__gradient_accumulation_steps=1)
    assert of(odd, "cuda_oom") == {"optim.per_device_train_batch_size": 1, "optim.gradient_accumulation_steps": 7}
    assert of(stored_with(stored, **memory), "host memory") == {"memory.gradient_checkpointing": "full"}
    memory["memory__gradient_checkpointing"] = "full"
    assert of(stored_with(stored, **memory), "GPU memory") == {"data.max_length": stored["data"]["max_length"] // 2}
    assert of(stored_with(stored, **memory, data__max_length=64), "cuda_oom") is None
    memory |= {"memory__recompute_num_layers": 3, "kernels__use_cut_ce": True, "kernels__cut_ce_workspace": 640}
    assert of(stored_with(stored, **memory), "cuda_oom") == {"memory.recompute_num_layers": None}
    memory["memory__recompute_num_layers"] = None
    assert of(stored_with(stored, **memory), "cuda_oom") == {"kernels.cut_ce_workspace": None}
    assert after_out_of_memory(stored_with(stored, **memory)).startswith("Set kernels.cut_ce_workspace to null, lower")
    for kind in ("error", "exception", "signal SIGKILL", "disk full"):
        assert of(stored, kind) is None


def test_what_the_worker_knows_to_mend_comes_first_unless_the_rules_refuse_it(stored):
    lines = [{"data.max_length": 10**9}, {"data.excess_length": "drop"}]
    view = fold(RunView(), [{"kind": "failed", "cause": "error", "message": "row 3", "mends": lines, "v": 1}])
    assert view.mends == lines
    assert propose(view, stored).settings == {"data.excess_length": "drop"}
    assert of(stored, "error", mends=[{"data.nowhere": 1}, {"": 2}]) is None


def test_a_checkpoint_is_gone_on_from_where_rows_and_weights_allow_it(stored):
    rate = propose(RunView(cause_kind="diverged"), stored_with(stored, optim__learning_rate=10.0))
    losses = Series()
    for step, loss in ((1, 2.0), (2, 1.5), (3, 1.0), (4, 9.0), (5, 9.5)):
        losses.add(step, loss)
    view = RunView(cause_kind="diverged", step=5, series={"loss": losses})
    assert goes_on(view, rate, 2)
    assert not goes_on(view, rate, 3)  # its weights gave the loss of step 4, worse than at the start
    assert not goes_on(view, rate, 4)  # the step after it broke
    assert not goes_on(view, rate, None)
    dropped = propose(RunView(cause_kind="error", mends=[{"data.excess_length": "drop"}]), stored)
    assert not goes_on(RunView(cause_kind="error"), dropped, 2)


def test_divergence_proposes_only_what_is_not_in_force():
    hot = {"optim": {"learning_rate": 10, "max_grad_norm": 0}, "model": {"dtype": "float32"}}
    words = after_divergence(hot, "checkpoint-4")
    assert "from 10 to 2e-05" in words
    assert "max_grad_norm: 1.0" in words
    assert "resume from checkpoint-4" in words
    assert "dtype" not in words
    clipped = {"optim": {"learning_rate": 1e-3, "max_grad_norm": 1.0}, "model": {"dtype": "float16"}}
    words = after_divergence(clipped, None)
    assert "max_grad_norm" not in words
    assert "model.dtype: bfloat16" in words
    assert "new run" in words


def test_want_of_memory_proposes_no_batch_below_one_and_no_checkpointing_twice():
    small = {"optim": {"per_device_train_batch_size": 1}, "memory": {"gradient_checkpointing": "full"},
             "data": {"max_length": 4096}, "adapter": {"kind": "lora"}}  # fmt: skip
    words = after_out_of_memory(small)
    assert "batch" not in words
    assert "checkpointing" not in words
    assert "4,096" in words


def test_going_on_as_it_is_is_only_proposed_where_that_can_help():
    assert way_on("signal SIGKILL", "checkpoint-4") == "resume from checkpoint-4"
    assert way_on("diverged", "checkpoint-4").startswith("put right what is named above")
    assert way_on("error", None).endswith("start again from the beginning")
