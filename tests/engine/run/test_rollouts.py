"""Groups of completions: whole on disk, small in the events, there after a torn end, never over the cap."""

from __future__ import annotations

import json
import math

from engine.run.rollouts import NAME, TEXT_CAP, Completion, Group, RolloutFile, read_group
from engine.run.store import RunFolder
from engine.run.view import RunView, fold


def group(step: int, text: str = "2021-03-03", prompt: str = "What is 3 March 2021?") -> Group:
    good = Completion(text, 5, {"exact_match": 1.0, "style": None}, 1.0, 0.7, cut_off=False)
    bad = Completion("2021-03-0", 16, {"exact_match": 0.0, "style": math.nan}, 0.0, -0.7, cut_off=True)
    return Group(step, 0, 12, prompt, "2021-03-03", [good, bad])


def test_a_group_comes_back_whole_from_its_event(run: RunFolder) -> None:
    file = RolloutFile(run)
    payloads = [file.add(group(1)), file.add(group(2, text='<img src=x onerror=alert(1)>\n"ß\ud800'))]
    view = fold(RunView(), [{"kind": "rollout", **payload} for payload in payloads if payload])
    assert [entry["step"] for entry in view.rollouts] == [1, 2]
    first = view.rollouts[0]
    assert (first["count"], first["cut_off"], first["reward"]) == (2, 1, 0.5)
    assert first["rewards"] == {"exact_match": 0.5, "style": None}
    found = read_group(run, first)
    assert found is not None
    assert [each["text"] for each in found["completions"]] == ["2021-03-03", "2021-03-0"]
    assert found["completions"][1]["rewards"] == {"exact_match": 0.0, "style": None}
    assert found["completions"][1]["cut_off"]
    second = read_group(run, view.rollouts[1])
    assert second is not None
    assert second["completions"][0]["text"].startswith("<img")


def test_a_torn_line_is_cut_and_what_follows_is_readable(run: RunFolder) -> None:
    RolloutFile(run).add(group(1))
    with (run.samples / NAME).open("a") as file:
        file.write('{"step": 2, "torn')
    payload = RolloutFile(run).add(group(3))
    assert payload is not None
    found = read_group(run, payload)
    assert found is not None
    assert found["step"] == 3
    assert len((run.samples / NAME).read_text().splitlines()) == 2


def test_a_full_file_takes_no_more_and_long_texts_lose_their_middle(run: RunFolder) -> None:
    long = "a" * 50_000 + "end"
    file = RolloutFile(run, cap=20_000)
    payload = file.add(group(1, text=long, prompt=long))
    assert payload is not None
    assert len(json.dumps(payload)) < 1_000
    found = read_group(run, payload)
    assert found is not None
    text = found["completions"][0]["text"]
    assert len(text) < TEXT_CAP + 100
    assert text.endswith("end")
    assert found["completions"][0]["characters"] == 50_003
    assert file.add(group(2, text=long, prompt=long)) is None
    assert (run.samples / NAME).stat().st_size <= 20_000


def test_a_place_that_holds_no_group_gives_none(run: RunFolder) -> None:
    assert read_group(run, {"offset": 0, "bytes": 10}) is None
    RolloutFile(run).add(group(1))
    assert read_group(run, {"offset": 5, "bytes": 10}) is None
    assert read_group(run, {"offset": -1, "bytes": 10}) is None
    assert read_group(run, {}) is None


def test_groups_above_the_step_that_a_resume_goes_back_to_are_gone() -> None:
    events = [{"kind": "rollout", "segment": 0, "step": step, "rewards": 3} for step in (1, 2, 3)]
    view = fold(
        RunView(),
        [
            {"kind": "metrics", "segment": 0, "step": 3, "loss": 1.0},
            *events,
            {"kind": "started", "segment": 1, "resumed_from_step": 2},
        ],
    )
    assert [entry["step"] for entry in view.rollouts] == [1, 2]
