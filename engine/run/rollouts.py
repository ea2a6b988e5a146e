"""Groups of completions with their rewards: whole in `samples/rollouts.jsonl`, announced by `rollout` events.

An event is small enough for every window to hold; the texts lie in the file at its `offset` and are read when somebody
looks at them. Both ends are here. The file has a cap, past which groups are neither written nor announced, and long
texts lose their middle. Standard library only.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.errors import WorkbenchError
from engine.run import inside
from engine.run.store import RunFolder

NAME = "rollouts.jsonl"
CAP = 64 << 20
LINE_CAP = 4 << 20
TEXT_CAP = 8_000  # characters of a prompt or a completion
PROMPT_SHOWN = 200  # characters of the prompt in the event
COMPLETIONS_CAP = 256


@dataclass(frozen=True)
class Completion:
    """One answer of a group. `rewards` by function, None where one does not apply; `cut_off` says that it met
    `max_completion_length`; `reward` is the weighted sum and `advantage` what the loss weighs its tokens by."""

    text: str
    tokens: int
    rewards: Mapping[str, float | None]
    reward: float | None
    advantage: float
    cut_off: bool


@dataclass(frozen=True)
class Group:
    """All completions of one prompt from one round of generation. `row` is its number over all sources, `answer` the
    reference that the rewards were given, if there is one; `replayed_from` the step at which they were sampled where they are
    trained on again, None where they are new."""

    step: int
    group: int
    row: int
    prompt: str
    answer: str | None
    completions: Sequence[Completion]
    replayed_from: int | None = None


class RolloutFile:
    """The writing end, held by the worker's first rank. A torn last line of an earlier life is cut off."""

    def __init__(self, run: RunFolder, cap: int = CAP) -> None:
        self._handle = inside.open_file(run, run.samples / NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._cap = cap
        self._size = self._complete_bytes()

    def _complete_bytes(self) -> int:
        size = os.fstat(self._handle).st_size
        end = size
        while end > 0:
            start = max(0, end - (1 << 16))
            newline = os.pread(self._handle, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._handle, end)
        return end

    def add(self, group: Group) -> dict[str, Any] | None:
        """Writes the group and gives the payload of its event, or None where the file is full."""
        line = json.dumps(_line(group), ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"
        data = line.encode("utf-8", "replace")
        if self._size + len(data) > self._cap or len(data) > LINE_CAP:
            return None
        offset = self._size
        os.write(self._handle, data)
        self._size += len(data)
        return {**_summary(group), "file": NAME, "offset": offset, "bytes": len(data)}

    def close(self) -> None:
        os.close(self._handle)


def read_group(run: RunFolder, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """The whole group behind a `rollout` event or an entry of `RunView.rollouts`; None where it is not there any more.

    Raises WorkbenchError when the file cannot be read.
    """
    offset, size = entry.get("offset"), entry.get("bytes")
    if type(offset) is not int or type(size) is not int or offset < 0 or not 0 < size <= LINE_CAP:
        return None
    try:
        handle = inside.open_file(run, run.samples / NAME)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise WorkbenchError(f"run {run.id}: its rollouts cannot be read: {problem.strerror}.") from problem
    try:
        data = os.pread(handle, size, offset)
    finally:
        os.close(handle)
    try:
        group = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return group if isinstance(group, dict) and isinstance(group.get("completions"), list) else None


def _line(group: Group) -> dict[str, Any]:
    return {
        "step": group.step,
        "group": group.group,
        "row": group.row,
        "prompt": shortened(group.prompt),
        "answer": None if group.answer is None else shortened(group.answer),
        **({} if group.replayed_from is None else {"replayed_from": group.replayed_from}),
        "completions": [
            {
                **asdict(completion),
                "rewards": {name: _finite(value) for name, value in completion.rewards.items()},
                "reward": _finite(completion.reward),
                "advantage": _finite(completion.advantage),
                "text": shortened(completion.text),
                "characters": len(completion.text),
            }
            for completion in group.completions[:COMPLETIONS_CAP]
        ],
    }


def _summary(group: Group) -> dict[str, Any]:
    rewards = [value for completion in group.completions if (value := _finite(completion.reward)) is not None]
    names = list(group.completions[0].rewards) if group.completions else []
    return {
        "step": group.step,
        "group": group.group,
        "row": group.row,
        "prompt": group.prompt if len(group.prompt) <= PROMPT_SHOWN else group.prompt[: PROMPT_SHOWN - 1] + "…",
        "count": len(group.completions),
        "reward": statistics.fmean(rewards) if rewards else None,
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else None,
        "rewards": {name: _mean(group, name) for name in names},
        "cut_off": sum(completion.cut_off for completion in group.completions),
        **({} if group.replayed_from is None else {"replayed_from": group.replayed_from}),
    }


def _mean(group: Group, name: str) -> float | None:
    values = [value for completion in group.completions if (value := _finite(completion.rewards.get(name))) is not None]
    return statistics.fmean(values) if values else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def shortened(text: str, cap: int = TEXT_CAP) -> str:
    """The text, or its beginning and end around a sentence that says how much of the middle was left out."""
    if len(text) <= cap:
        return text
    half = cap // 2
    return f"{text[:half]}\n[{len(text) - 2 * half:,} characters left out]\n{text[-half:]}"
