"""The one meaning of the events: same in any batching, never upset, true after a resume."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.run.view import MAX_SAMPLES, RunView, fold

KINDS = [
    "started",
    "phase",
    "progress",
    "receipt",
    "metrics",
    "gpu",
    "ranks",
    "batch",
    "sample",
    "rollout",
    "checkpoint",
    "finding",
    "control",
]
KINDS += ["diverged", "finished", "stopped", "failed", "from the future"]
scalar = st.none() | st.booleans() | st.integers(-5, 60) | st.floats(allow_nan=True) | st.text(max_size=5)
anything = scalar | st.lists(scalar, max_size=3) | st.lists(st.dictionaries(st.text(max_size=4), scalar), max_size=2)
KEYS = [
    "step",
    "loss",
    "segment",
    "seq",
    "t",
    "max_steps",
    "resumed_from_step",
    "entries",
    "devices",
    "id",
    "status",
    "do",
]
KEYS += ["state", "path", "name", "index", "prompt", "completion", "what", "cause", "lines", "epoch", "rewards/margins"]
event = st.builds(
    lambda kind, payload: {**payload, "kind": kind},
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(KEYS), anything),
)
tidy = st.builds(
    lambda kind, step, loss, segment, back: {
        "kind": kind, "step": step, "loss": loss, "segment": segment, "resumed_from_step": back, "t": float(step),
    },
    st.sampled_from(["metrics"] * 8 + ["started", "sample", "checkpoint", "finished"]),
    st.integers(0, 50), st.floats(0, 9), st.integers(0, 3), st.none() | st.integers(0, 40),
)  # fmt: skip


def same(one: RunView, other: RunView) -> bool:
    # repr, because a floating NaN that came in as a text field is not equal to itself.
    return repr(one.as_json()) == repr(other.as_json()) and one.series == other.series


@given(st.lists(event | tidy, max_size=40), st.lists(st.integers(0, 40), max_size=5))
@settings(max_examples=150, deadline=None)
def test_the_same_events_give_the_same_view_in_any_batching(events, cuts):
    at_once = fold(RunView(), events)
    one_by_one = RunView()
    for entry in events:
        before = repr(one_by_one.as_json())
        after = fold(one_by_one.copy(), [entry])
        assert repr(one_by_one.as_json()) == before
        one_by_one = after
    batched, place = RunView(), 0
    for cut in [*sorted(cuts), len(events)]:
        fold(batched, events[place:cut])
        place = max(place, cut)
    assert same(at_once, one_by_one)
    assert same(at_once, batched)
    json.dumps(at_once.as_json(points=20))


def history(*parts) -> RunView:
    view, seq = RunView(), 0
    for segment, events in enumerate(parts):
        for entry in events:
            fold(view, [{"seq": seq, "t": 100.0 + seq, "segment": segment, **entry}])
            seq += 1
    return view


def started(back=None, max_steps=100):
    return {"kind": "started", "method": "sft", "model": "m", "max_steps": max_steps, "resumed_from_step": back}


def metrics(first, last, loss):
    return [{"kind": "metrics", "step": step, "loss": loss} for step in range(first, last + 1)]


def test_points_above_the_step_a_resume_went_back_to_are_superseded():
    view = history(
        [started(), *metrics(1, 50, 1.0), {"kind": "sample", "step": 45, "index": 0}, {"kind": "failed", "cause": "x"}],
        [started(back=40), *metrics(41, 45, 2.0)],
    )
    steps, low, _ = view.series["loss"].points()
    assert list(steps) == list(range(1, 46))
    assert list(low) == [1.0] * 40 + [2.0] * 5
    assert view.superseded == [{"segment": 1, "above": 40, "to": 50, "points": 10}]
    assert (view.state, view.step, view.resumed_from, view.samples) == ("running", 45, 40, [])
    assert view.cause == ""


def test_a_run_that_starts_over_without_a_checkpoint_begins_its_curve_again():
    view = history(
        [started(), *metrics(1, 9, 1.0)], [{"kind": "phase", "name": "Loading"}, started(), *metrics(1, 3, 2.0)]
    )
    assert list(view.series["loss"].points()[1]) == [2.0, 2.0, 2.0]
    assert view.step == 3


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "starting"),
        ([{"kind": "phase", "name": "Loading"}], "starting"),
        ([started()], "running"),
        ([started(), {"kind": "control", "id": "1", "do": "checkpoint", "status": "accepted"}], "running"),
        ([started(), {"kind": "control", "id": "1", "do": "save_stop", "status": "accepted"}], "stopping"),
        ([started(), {"kind": "control", "id": "1", "do": "stop", "status": "refused"}], "running"),
        ([started(), {"kind": "finished", "step": 100}], "finished"),
        ([started(), {"kind": "stopped", "step": 3, "by": "me"}], "stopped"),
        ([started(), {"kind": "failed", "cause": "c", "message": "Said.", "lines": ["l"]}], "failed"),
    ],
)
def test_states(events, state):
    assert history(events).state == state


def test_time_left_follows_the_pace_and_ends_with_the_run():
    view = history([started(max_steps=200), *metrics(1, 100, 1.0)])
    assert view.eta_seconds == pytest.approx(100.0)
    fold(view, [{"kind": "finished", "step": 200, "segment": 0}])
    assert view.eta_seconds is None
    late = {"kind": "checkpoint", "step": 200, "path": "c", "state": "committed", "segment": 0}
    assert fold(view, [late]).eta_seconds is None, "what is told behind the end makes no time left"


def schedule(steps=60, step=1.0, **took):
    """A run's events by a clock that knows what is to come: answers before the line of a step, evaluation and checkpoint behind."""
    every = {"eval": 20, "save": 30, "prompts": 15}
    events, t = [{**started(max_steps=steps), "t": 0.0, "pauses": list(every.values()), "pause_steps": every}], 0.0
    for number in range(1, steps + 1):
        t += step
        if number % every["prompts"] == 0 or number == steps:
            t += took["prompts"]
            events += [{"kind": "sample", "step": number, "index": index, "t": t} for index in range(2)]
        events.append({"kind": "metrics", "step": number, "loss": 1.0, "step_seconds": step, "t": t})
        if number % every["eval"] == 0:
            t += took["eval"]
            events.append({"kind": "metrics", "step": number, "eval_loss": 1.0, "eval_runtime": took["eval"], "t": t})
        if number % every["save"] == 0:
            events.append({"kind": "checkpoint", "step": number, "path": "c", "state": "saving", "t": t})
            t += took["save"]
            events.append({"kind": "checkpoint", "step": number, "path": "c", "state": "committed", "t": t})
    return [{"v": 1, "seq": seq, "segment": 0, **event} for seq, event in enumerate(events)], t


def test_time_left_counts_what_comes_between_steps_as_often_as_it_still_will():
    events, end = schedule(eval=40.0, save=5.0, prompts=3.0)
    view, told = RunView(), {}
    for event in events:
        fold(view, [event])
        if event["kind"] == "metrics" and "loss" in event and view.eta_seconds is not None:
            told[view.step] = view.eta_seconds, end - event["t"]
    assert all(said == pytest.approx(came, rel=0.01) for step, (said, came) in told.items() if step > 31)
    said, came = told[60]
    assert said == came == 45.0, "an evaluation and a checkpoint come behind the last step"
    # Until it was seen what they take, no evaluation is counted: not as part of a step either.
    assert told[19][0] == pytest.approx(41 + 3 * 3.0)
    assert told[22][0] == pytest.approx(38 + 3 * 3.0 + 2 * 40.0)
    assert view.step_seconds == pytest.approx(1.0)


def test_time_left_goes_on_while_the_next_event_is_waited_for_and_stops_where_it_is_late():
    events, _ = schedule(eval=40.0, save=5.0, prompts=3.0)
    view = fold(
        RunView(),
        [event for event in events if event.get("step", 0) < 40 or ("step_seconds" in event and event["step"] == 40)],
    )
    assert view.step == 40
    assert view.seconds_left(view.updated) == view.eta_seconds
    assert view.seconds_left(view.updated + 30) == pytest.approx(view.eta_seconds - 30)
    assert view.seconds_left(view.updated + 3000) == pytest.approx(view.eta_seconds - 41), "the evaluation and a step"
    assert view.seconds_left(view.updated - 3000) == view.eta_seconds, "another machine's clock"
    fold(view, [{"kind": "control", "id": "a", "do": "save_stop", "status": "accepted", "segment": 0}])
    assert view.seconds_left() is None, "it ends earlier"


def test_waiting_for_the_compiler_is_no_pace():
    view = history([started(max_steps=200), *metrics(1, 100, 1.0)])
    told = view.eta_seconds
    later = [{"kind": "phase", "name": "Compiling layers: why"}, {"kind": "phase", "name": "Training"}]
    fold(view, [{**event, "t": view.updated + 100, "segment": 0} for event in later])
    fold(view, [{"kind": "metrics", "step": 101, "t": view.updated + 1, "segment": 0, "loss": 1.0}])
    assert view.eta_seconds == pytest.approx(told - 1)


def test_an_evaluation_that_waited_for_the_compiler_does_not_tell_what_the_next_will_take():
    events, _ = schedule(eval=40.0, save=5.0, prompts=3.0)
    at = next(place for place, event in enumerate(events) if "eval_loss" in event)
    told = fold(RunView(), events[:at]).eta_seconds
    compiling = {**events[at], "kind": "phase", "name": "Compiling layers: why"}
    assert fold(RunView(), [*events[:at], compiling, events[at]]).eta_seconds == told
    assert fold(RunView(), events[: at + 1]).eta_seconds == pytest.approx(told + 2 * 40)


def test_a_receipt_entry_takes_the_place_of_the_earlier_one_of_its_feature():
    first = {
        "kind": "receipt",
        "entries": [{"feature": "attention", "effective": "sdpa"}, {"feature": "lora", "count": 4}],
    }
    view = history([started(), first, {"kind": "receipt", "entries": [{"feature": "attention", "effective": "eager"}]}])
    assert [(entry["feature"], entry["effective"]) for entry in view.receipt] == [
        ("attention", "eager"),
        ("lora", None),
    ]


def test_a_resumed_run_shows_the_receipt_of_its_own_start():
    both = [{"feature": "processes", "count": 2}, {"feature": "rows", "count": 9}]
    before = [started(), {"kind": "receipt", "entries": both}]
    assert [entry["feature"] for entry in history(before, [started()]).receipt] == ["processes", "rows"]
    view = history(before, [started(), {"kind": "receipt", "entries": both[1:]}])
    assert [entry["feature"] for entry in view.receipt] == ["rows"]


def test_a_checkpoint_keeps_its_size_when_it_is_deleted():
    saved = {"kind": "checkpoint", "step": 5, "path": "checkpoint-5", "bytes": 10, "seconds": 1.0, "state": "committed"}
    view = history([started(), saved, {"kind": "checkpoint", "step": 5, "path": "checkpoint-5", "state": "deleted"}])
    assert view.checkpoints == [{"step": 5, "path": "checkpoint-5", "bytes": 10, "seconds": 1.0, "state": "deleted"}]


def test_samples_before_training_and_the_newest_stay():
    samples = [{"kind": "sample", "step": step, "index": index} for step in range(0, 1000, 2) for index in range(3)]
    view = history([started(), *samples])
    assert len(view.samples) <= MAX_SAMPLES
    assert [sample["step"] for sample in view.samples[:3]] == [0, 0, 0]
    assert view.samples[-1]["step"] == 998


def test_curves_are_bounded_in_number():
    view = history([started(), *({"kind": "metrics", "step": 1, f"m{n}": 1.0} for n in range(2000))])
    assert len(view.series) == 256


def test_what_a_run_no_longer_measures_since_it_went_on_is_not_where_it_stands():
    """As the tokens that were left out, once a run is held to a reference and computes all."""
    view = RunView()
    told = {"loss": 1.0, "frac_tokens_skipped": 0.5, "entropy": 2.0}
    fold(view, [{"kind": "metrics", "seq": 1, "t": 1.0, "segment": 0, "step": 4, **told}])
    fold(view, [{"kind": "metrics", "seq": 2, "t": 2.0, "segment": 0, "step": 4, "eval_loss": 3.0}])
    fold(view, [{"kind": "started", "seq": 3, "t": 9.0, "segment": 1, "resumed_from_step": 4}])
    assert view.latest == {**told, "eval_loss": 3.0}, "until there is a step"
    fold(view, [{"kind": "metrics", "seq": 4, "t": 10.0, "segment": 1, "step": 5, "loss": 0.5, "entropy": 1.0}])
    assert view.latest == {"loss": 0.5, "entropy": 1.0, "eval_loss": 3.0}
    fold(view, [{"kind": "metrics", "seq": 5, "t": 11.0, "segment": 1, "step": 6, "loss": 0.25}])
    assert view.latest["entropy"] == 1.0, "within a segment what was told last"
    assert view.series["frac_tokens_skipped"].last == (4, 0.5), "its curve stays"


def test_time_between_two_segments_is_no_work():
    from engine.run.view import RunView, fold

    def event(t, kind, segment, **more):
        return {"v": 1, "seq": int(t), "t": t, "segment": segment, "kind": kind, **more}

    view = fold(
        RunView(),
        [
            event(100.0, "started", 0, max_steps=20),
            event(110.0, "metrics", 0, step=5, loss=1.0),
            event(5000.0, "started", 1, max_steps=20, resumed_from_step=5),
            event(5030.0, "finished", 1, step=20),
        ],
    )
    assert (view.seconds, view.started, view.ended) == (40.0, 100.0, 5030.0)


def test_a_slow_first_step_does_not_weigh_on_the_time_left_for_long():
    from engine.run.view import RunView, fold

    view, t = RunView(), 0.0
    events = [{"v": 1, "seq": 0, "t": t, "segment": 0, "kind": "started", "max_steps": 110}]
    for step in range(11):
        t += 20.0 if step == 1 else 1.0
        events.append({"v": 1, "seq": step + 1, "t": t, "segment": 0, "kind": "metrics", "step": step, "loss": 1.0})
    left = fold(view, events).eta_seconds
    assert 100 <= left <= 2.0 * 100 * 1.5


@pytest.mark.parametrize("state", ["created", "queued", "starting", "running", "finished", "stopped", "failed", "lost"])
def test_a_run_is_over_once_nothing_more_can_come(state):
    assert RunView(state=state).over == (state in ("finished", "stopped", "failed", "lost"))


def test_the_rank_that_others_wait_for_is_named_once_it_stands_out() -> None:
    def of(*ranks: dict[str, Any], **figures: list[Any]) -> RunView:
        columns = {"data_seconds": [0.01, 0.01, 0.01, 0.01], "forward_seconds": [0.2, 0.2, 0.2, 0.2], **figures}
        events = [
            {"kind": "started", "seq": 0, "t": 1.0, "segment": 0, "world_size": 4},
            {"kind": "metrics", "seq": 1, "t": 2.0, "segment": 0, "step": 3, "step_seconds": 1.0},
            {"kind": "ranks", "seq": 2, "t": 2.0, "segment": 0, "step": 3, **columns},
            *ranks,
        ]
        return fold(RunView(), events)

    assert of().slowest is None
    assert of(forward_seconds=[0.2, 0.2, 0.29, 0.2]).slowest is None, "less than a tenth of the step"
    late = of(forward_seconds=[0.2, 0.2, 0.2, 0.5], data_seconds=[0.01, 0.81, 0.01, 0.01])
    assert late.slowest == (1, "data", pytest.approx(0.8))
    assert late.slowest_text == "rank 1 takes 800 ms a step longer for its data than others"
    assert late.as_json()["slowest"] == {"rank": 1, "at": "data", "seconds": pytest.approx(0.8)}
    assert [rank["forward_seconds"] for rank in late.ranks] == [0.2, 0.2, 0.2, 0.5]
    waits = {"communication_seconds": [0.4, 0.41, 0.05, 0.4], "step_seconds": 0.8}
    own = of(**waits)
    assert own.slowest == (2, "own work", pytest.approx(0.35)), "who is late waits least"
    assert own.slowest_text == "rank 2 takes 350 ms a step longer for its own work than others"
    assert of(forward_seconds=[0.2, 0.2, 0.4, 0.2], **waits).slowest[:2] == (2, "forward pass"), (
        "where it is known at what"
    )
    assert of(communication_seconds=[0.4, None, 0.05, 0.4]).slowest is None
    assert [rank["communication_share"] for rank in own.ranks] == [
        pytest.approx(share) for share in (0.5, 0.5125, 0.0625, 0.5)
    ]
    assert own.series["communication/rank2"].last == (3, pytest.approx(0.0625))
    assert of().ranks[0]["communication_share"] is None
    assert not [name for name in of(communication_seconds=[0.1] * 4).series if name.startswith("comm")], (
        "of what step is not told"
    )
    odd = of(data_seconds=["x", None], forward_seconds=[0.2])
    assert (len(odd.ranks), odd.slowest) == (2, None)
    assert of({"kind": "started", "seq": 3, "t": 9.0, "segment": 1}).ranks == [], "a new start has none yet"
