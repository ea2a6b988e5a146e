"""What `auto` becomes is told with a reason that holds."""

from __future__ import annotations

import pytest

from engine.config.facts import DataFacts, Facts, SourceFacts
from engine.hardware import GiB, Gpu, Machine
from engine.planning.auto import effective
from engine.planning.sharding import replicas_divide_the_processes
from engine.rules import read


def auto(path, mapping, facts=None):
    (entry,) = (entry for entry in effective(read({"version": 1, **mapping}).config, facts) if entry.path == path)
    return entry


@pytest.mark.parametrize(
    ("held_out", "reason"), [(0, "not used: no rows are held out"), (0.1, "ten times in 50 steps")]
)
def test_nobody_is_told_of_evaluations_where_no_rows_are_held_out(held_out, reason):
    data = {"train": [{"path": "builtin/dates"}], "val_set_size": held_out}
    config = read({"version": 1, "data": data, "optim": {"max_steps": 50}}).config
    (entry,) = (entry for entry in effective(config, None) if entry.path == "run.eval_steps")
    assert (reason in entry.reason, entry.effective) == (True, 5)


@pytest.mark.parametrize(("steps", "every", "told"), [(2, 1, "2 times in 2 steps"), (17, 2, "8 times in 17 steps")])
def test_a_run_too_short_for_ten_evaluations_is_not_told_of_ten(steps, every, told):
    data = {"train": [{"path": "builtin/dates"}], "val_set_size": 0.1}
    found = auto("run.eval_steps", {"data": data, "optim": {"max_steps": steps}})
    assert (found.effective, found.reason) == (every, f"evaluates {told}")


def test_lion_takes_a_fifth_of_adamws_rate_with_less_state():
    plain, lion = (
        auto("optim.learning_rate", {"optim": {"optim": optimizer}}) for optimizer in ("adamw_torch", "lion_32bit")
    )
    assert lion.effective == pytest.approx(plain.effective / 5)
    assert lion.reason == f"a fifth of {plain.reason}: Lion wants 3 to 10 times less than AdamW (arXiv:2302.06675)"


@pytest.mark.parametrize(
    ("settings", "left_out", "reason"),
    [
        ({}, True, "their gradient is zero"),
        ({"method": {"beta": 0.1}}, False, "method.beta holds each answer"),
        ({"kernels": {"torch_compile": True}}, False, "compiled layers would wait again"),
    ],
)
def test_answers_that_teach_nothing_are_left_out_where_their_gradient_is_zero(settings, left_out, reason):
    method = {"kind": "grpo", "reward_funcs": ["exact_match"], **settings.get("method", {})}
    entry = auto("method.skip_zero_advantage", {**settings, "method": method})
    assert (entry.effective, entry.reason.startswith(reason)) == (left_out, True)


@pytest.mark.parametrize(("times", "every"), [(1, 13), (2, 6), (100, 1)])
def test_what_is_asked_for_by_the_epoch_is_told_in_steps(times, every):
    facts = Facts(data=DataFacts(rows=100, eval_rows=5))
    run = {"run": {"evals_per_epoch": times, "saves_per_epoch": times}, "data": {"val_set_size": 5}}
    for path, label in (("run.eval_steps", "evaluates"), ("run.save_steps", "keeps a checkpoint")):
        entry = auto(path, run, facts)
        assert (entry.effective, entry.reason) == (every, f"{label} {times} times an epoch of 13 steps")


def test_a_split_of_processes_that_is_none_is_mended_by_the_next_smaller_one():
    for asked, taken in ((3, 2), (8, 4)):
        config = read({"version": 1, "run": {"devices": 8}, "distributed": {"dp_replicate_size": asked}}).config
        (finding,) = replicas_divide_the_processes(config, Facts())
        assert finding.fix.set == {"distributed.dp_replicate_size": taken}
        assert "must be 1, 2 or 4 with 8 processes" in finding.message


@pytest.mark.parametrize(("size", "rows", "held"), [(0.1, 13, 10), (1, 13, 1), (40, 8, 40)])
def test_rows_that_are_held_out_are_told_before_they_are_counted_and_not_trained_on(size, rows, held):
    from engine.planning.estimate import estimate

    data = {"train": [{"path": "rows.jsonl", "rows": 100}], "val_set_size": size}
    facts = Facts(sources={"rows.jsonl": SourceFacts("rows.jsonl", rows=1000)})
    found = estimate(read({"version": 1, "data": data}).config, facts)
    assert (found.eval_rows, found.steps) == (held, rows - (size == 0.1))


def test_the_smallest_card_and_a_part_of_the_hosts_memory_bound_a_process():
    from engine.planning.memory_model import device_bytes

    config = read({"version": 1, "run": {"devices": 2}}).config
    cards = Machine(gpus=tuple(Gpu("card", size * GiB, (9, 0)) for size in (80, 24, 40)), name="cards")
    assert device_bytes(config, Facts(machine=cards)) == 24 * GiB
    assert device_bytes(config, Facts(machine=Machine(memory_bytes=64 * GiB, name="cpu"))) == 32 * GiB
