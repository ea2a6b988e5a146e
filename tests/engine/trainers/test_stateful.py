"""State that a trainer registers goes into each checkpoint and comes back, or the resume ends in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.errors import WorkbenchError
from engine.trainers import sft
from engine.trainers.stateful import Parts
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from


class Buffer:
    """Counts the steps of a run, half of them from before the resume."""

    def __init__(self) -> None:
        self.seen = torch.zeros(0, dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "of": {"kind": "test", "sizes": [len(self.seen)]}}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        assert state["of"] == {"kind": "test", "sizes": [len(state["seen"])]}
        self.seen = state["seen"]


class Counting(sft.Sft):
    """A trainer with a part: each step adds its number, and the loss carries the sum so far."""

    buffer: Buffer

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.buffer.seen = torch.cat([self.buffer.seen, torch.tensor([self.state.global_step])])
        return super().training_step(*args, **kwargs) * (1 + self.buffer.seen.sum().item())


@pytest.fixture
def with_part(monkeypatch):
    """SFT whose loss depends on a registered part; the newest part made."""
    made: list[Buffer] = []
    plain = sft.build

    def build(*args: Any, **kwargs: Any) -> Any:
        trainer = plain(*args, **kwargs)
        made.append(Buffer())
        trainer.buffer = made[-1]
        trainer.register_state("buffer", made[-1])
        return trainer

    monkeypatch.setattr(sft, "Sft", Counting)
    monkeypatch.setattr(sft, "build", build)
    return made


def test_a_registered_part_comes_back_with_its_checkpoint_so_that_resuming_equals_never_stopping(
    train, source, tmp_path, with_part
):
    whole = train({"data.train": [{"path": source(CONVERSATIONS)}]})
    again = train(folder=resumed_from(whole, 4, tmp_path / "again"))
    first, second = with_part
    assert first.seen.tolist() == second.seen.tolist() == [step for step in range(10) for _ in range(2)]
    losses = [{e["step"]: e["loss"] for e in lines(run, "metrics") if e["step"] > 4} for run in (whole, again)]
    assert losses[0] == losses[1]


def test_a_checkpoint_without_the_state_of_a_part_ends_the_resume(tmp_path):
    with pytest.raises(WorkbenchError, match=r"holds no state of buffer for rank 0, so training could not go on"):
        _parts(buffer=Buffer()).load(tmp_path, 0)


def _parts(**parts: Any) -> Parts:
    found = Parts()
    for name, part in parts.items():
        found.add(name, part)
    return found


def test_state_that_no_part_wants_is_not_passed_over(tmp_path):
    _parts(buffer=Buffer()).save(tmp_path, 3)
    with pytest.raises(WorkbenchError, match="holds state of buffer for rank 3"):
        Parts().load(tmp_path, 3)
    Parts().load(tmp_path, 0)


def test_a_process_more_than_there_were_takes_the_state_that_all_had(tmp_path):
    class Own(Buffer):
        """What it holds is its process's alone."""

        def load_of_others(self, state: dict[str, Any], /) -> None:
            self.seen = torch.full((1,), -1)

    saved = _parts(same=Buffer(), own=Own())
    for part in saved._parts.values():
        part.seen = torch.arange(3)
    for rank in range(2):
        saved.save(tmp_path, rank)
    for rank, ranks, own in [(1, 2, [0, 1, 2]), (3, 4, [-1]), (0, 1, [-1])]:
        again = _parts(same=Buffer(), own=Own())
        again.load(tmp_path, rank, ranks)
        assert [part.seen.tolist() for part in again._parts.values()] == [[0, 1, 2], own]


def test_a_saved_part_cannot_run_code_when_it_is_read(tmp_path):
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(canary), "w"))

    torch.save({"buffer": {"seen": Evil()}}, tmp_path / "parts-0.pt")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        _parts(buffer=Buffer()).load(tmp_path, 0)
    assert not canary.exists()


@pytest.mark.parametrize("name", ["", "Buffer", "a/b", "taken"])
def test_names_of_parts_are_plain_and_their_own(name):
    with pytest.raises(ValueError, match="a part needs"):
        _parts(taken=Buffer()).add(name, SimpleNamespace())  # type: ignore[arg-type]
