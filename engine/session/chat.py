"""A chat without a screen: who answers, what was said, how it is sampled, and the process that holds the models.

Both frontends and `workbench chat --prompt` are this object behind another frontend. The process is started by `load`, kept
while the session is open, and ends with it. What it answers comes on a thread of its own, which changes the turns and then
calls `wake`; a frontend draws what stands there.

For a model that answers, each text is the next turn of one conversation. For a reward model the first text is the prompt
and each further one an answer to be scored; for an embedding model the first is the query and each further one a text to
be ranked with those before.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from engine.client import Inspector, Ticket
from engine.config.files import parse
from engine.config.tree import RunConfig
from engine.errors import Cancelled, UsageError, WorkbenchError, visible
from engine.figures import size
from engine.rules import read
from engine.run import checkpoint, devices
from engine.run.launch import devices_of_live
from engine.run.store import RunFolder
from engine.session.conversation import Answer, Conversation, Kind, Settings, Turn

COMMAND = (sys.executable, "-P", "-m", "engine.chat")
Only = Literal["", "base", "tuned"]


@dataclass(frozen=True)
class Who:
    """One who answers: a run's checkpoint, or with none the base model of the run."""

    title: str
    run: RunFolder
    checkpoint: int | None
    note: str = ""
    """What a person should know of it: newer checkpoints that are not whole."""


def kind_of(run: RunFolder) -> tuple[Kind, RunConfig]:
    """What a run's model does with a text, and the run's config. Raises WorkbenchError for one that does neither."""
    config = read(parse(run.read_config(), path=run.config).mapping).config
    head = config.method.head
    if head == "steps":
        raise WorkbenchError(
            f"{run.id} trained a process reward model, which judges the steps of an answer; the chat shows answers, scores and "
            "nearness.",
            "Load its checkpoint with transformers' AutoModelForTokenClassification.",
        )
    kinds: dict[str, Kind] = {"vocabulary": "text", "score": "score", "none": "rank"}
    return kinds[head], config


def who_answers(runs: Sequence[RunFolder], checkpoints: Sequence[int] = (), only: Only = "") -> list[Who]:
    """Up to two sides: a run's checkpoint (its newest whole one) beside its base model; two checkpoints of a run; or two
    runs, each with its checkpoint. `only` leaves one of the first pair.

    Raises UsageError for too many, and WorkbenchError for a run without the checkpoint.
    """
    if not 1 <= len(runs) <= 2:
        raise UsageError(f"a chat has one run or two; got {len(runs)}.")
    if len(checkpoints) > 2 or (only and len(checkpoints) + len(runs) > 2):
        raise UsageError("a chat has two sides at most; leave out a run, a --checkpoint, --base or --tuned.")
    if only == "base" and (checkpoints or len(runs) > 1):
        raise UsageError("--base: is the base model alone, so no checkpoint and no second run can be named.")
    kinds = [kind_of(run) for run in runs]
    if len({kind for kind, _ in kinds}) > 1:
        raise UsageError(f"{runs[0].id} and {runs[1].id} answer in different ways (text, scores, nearness).")
    kind, config = kinds[0]
    base = Who(f"base {visible(config.model.name)}", runs[0], None)
    if kind == "score" and only == "base":
        raise UsageError("--base: the base of a reward model has no trained head, so its scores would be random.")
    if only == "base":
        return [base]
    if len(runs) == 2:
        steps = [*checkpoints, *([None] * (2 - len(checkpoints)))]
        return [_tuned(run, step) for run, step in zip(runs, steps, strict=True)]
    if len(checkpoints) == 2:
        return [_tuned(runs[0], step) for step in checkpoints]
    tuned = _tuned(runs[0], checkpoints[0] if checkpoints else None)
    return [tuned] if only or kind == "score" else [tuned, base]


def _tuned(run: RunFolder, step: int | None) -> Who:
    run.refuse_flaws()
    if step is None:
        newest, skipped = checkpoint.newest_valid(run, hashes=False)
        at_step = checkpoint.step_of(newest) if newest is not None else None
        if at_step is None:
            why = f" ({skipped[0][0].name}: {skipped[0][1]})" if skipped else ""
            raise WorkbenchError(
                f"{run.id} has no whole checkpoint to talk to{why}.",
                f"{checkpoint.way_to_one(run)} --base talks to its base model.",
            )
        note = "; ".join(f"{path.name} of {visible(run.id)} is passed over: {reason}" for path, reason in skipped[:2])
        return Who(f"{run.id} checkpoint {at_step}", run, at_step, f"{note}." if note else "")
    if checkpoint.problem_with(run.checkpoints / f"checkpoint-{step}"):
        whole = sorted(
            place
            for path in run.checkpoints.glob("checkpoint-*")
            if (place := checkpoint.step_of(path)) is not None and checkpoint.is_valid(path)
        )
        has = f"its whole ones are {', '.join(map(str, whole))}" if whole else "it has none that is whole"
        raise UsageError(f"--checkpoint: {run.id} has no whole checkpoint {step}; {has}.")
    return Who(f"{run.id} checkpoint {step}", run, step)


class ChatSession:
    """One chat: its sides, turns and settings, and the process that answers.

    `state` is `new`, `loading`, `ready`, `answering` or `failed`; `phase` and `phase_since` (seconds of `time.monotonic`)
    say what goes on, `problem` what failed, `notes` what a person should know.
    """

    def __init__(
        self,
        who: Sequence[Who],
        settings: Settings | None = None,
        *,
        tools: Sequence[Any] = (),
        device: str = "auto",
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.who = list(who)
        self.kind, _ = kind_of(self.who[0].run)
        self.conversation = Conversation(
            self.kind, [one.title for one in self.who], settings or Settings(), list(tools)
        )
        self.state, self.phase, self.problem = "new", "", ""
        self.phase_since = time.monotonic()
        self.loaded: dict[str, Any] = {}
        environment, beside = _environment(self.who[0].run, device)
        self.notes: list[str] = [*(one.note for one in self.who if one.note), *beside]
        self.version = 0
        """Grows with every change."""
        self._wake = wake
        self._lock = threading.RLock()
        self._client = Inspector(COMMAND, name="the chat's process", environment=environment)

    # -- the process ---------------------------------------------------------------------------------------------------
    @property
    def pid(self) -> int | None:
        """The process that holds the models, while it lives."""
        return self._client.pid

    def load(self) -> Ticket:
        """Start loading; returns at once."""
        self._now("loading", "Starting")
        sides = [{"title": one.title, "run": str(one.run.path), "checkpoint": one.checkpoint} for one in self.who]
        ticket = self._client.ask(
            "load", on_progress=lambda message: self._now("loading", message["phase"]), sides=sides
        )
        ticket.add_done_callback(self._loaded)
        return ticket

    def _loaded(self, ticket: Ticket) -> None:
        if ticket.error is not None:
            self._failed(ticket.error)
            return
        with self._lock:
            self.loaded = ticket.result()
            before = [one.note for one in self.who]
            self.notes = [note for note in self.notes if "is training on" in note or note in before]
            if self.loaded["models"] > 1:
                self.notes.append(
                    f"{self.loaded['models']} models are loaded, {size(self.loaded['bytes'])} together: they share no weights."
                )
            self.conversation.has_template = all(side["template"] for side in self.loaded["sides"])
            if self.kind == "text" and not self.conversation.has_template:
                self.notes.append("No chat template: each text is continued as it stands, without those before it.")
        self._now("ready", "")

    def _failed(self, problem: WorkbenchError) -> None:
        self.problem = "" if isinstance(problem, Cancelled) else problem.full_message
        self._now("failed", "")

    def _now(self, state: str, phase: str) -> None:
        with self._lock:
            if phase != self.phase:
                self.phase_since = time.monotonic()
            self.state, self.phase = state, phase
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._wake()

    def close(self) -> None:
        """End the process, and with it what it holds of memory."""
        self._wake = lambda: None
        self._client.close()

    # -- talking -------------------------------------------------------------------------------------------------------
    def send(self, text: str) -> list[Ticket]:
        """Give the next text; the answers come by themselves. Raises UsageError for an empty one or too early."""
        if not text.strip():
            raise UsageError(f"the {self.conversation.wants} is empty.")
        self._refuse_unless_ready()
        if self.kind == "text":
            return self._ask_both(text)
        self.conversation.texts.append(text)
        if len(self.conversation.texts) == 1:
            self._changed()
            return []
        return self._score(text) if self.kind == "score" else self._rank()

    def retry(self) -> list[Ticket]:
        """Answer the newest text anew, with the settings as they are now. Raises UsageError where there is none."""
        self._refuse_unless_ready()
        if not self.conversation.turns or self.kind != "text":
            raise UsageError("there is no answer to make again.")
        return self._ask_both(self.conversation.turns.pop().prompt)

    def stop(self) -> None:
        """End the answers that are being made; what they say so far stays."""
        if self.state == "answering":
            self._client.ask("stop")

    def renew(self) -> None:
        """Begin a new conversation."""
        self._refuse_unless_ready()
        self.conversation.turns, self.conversation.texts = [], []
        self._changed()

    def _refuse_unless_ready(self) -> None:
        if self.state == "ready" and self.pid is None:
            self._failed(WorkbenchError("the chat's process has ended.", "Load the model again."))
        if self.state == "failed":
            raise UsageError(self.problem or "the chat's process has ended.")
        if self.state != "ready":
            what = "an answer is being made; stop it first" if self.state == "answering" else "the model is loading"
            raise UsageError(f"{what}.")

    def _ask_both(self, text: str) -> list[Ticket]:
        turn = Turn(text, [Answer() for _ in self.who])
        self.conversation.turns.append(turn)
        sampling = self.conversation.settings.sampling()
        return self._ask_sides(
            turn,
            "answer",
            lambda side: {
                "messages": self.conversation.messages(side),
                "tools": self.conversation.tools,
                "sampling": sampling,
            },
        )

    def _score(self, answered: str) -> list[Ticket]:
        turn = Turn(answered, [Answer() for _ in self.who])
        self.conversation.turns.append(turn)
        messages = [{"role": "user", "content": self.conversation.texts[0]}]
        if self.conversation.settings.system:
            messages.insert(0, {"role": "system", "content": self.conversation.settings.system})
        return self._ask_sides(turn, "score", lambda side: {"messages": messages, "answer": answered})

    def _rank(self) -> list[Ticket]:
        turn = Turn(self.conversation.texts[0], [Answer() for _ in self.who])
        self.conversation.turns = [turn]
        query, *texts = self.conversation.texts
        return self._ask_sides(turn, "rank", lambda side: {"query": query, "texts": texts})

    def _ask_sides(self, turn: Turn, do: str, question: Callable[[int], dict[str, Any]]) -> list[Ticket]:
        """Ask each side, and let its answer grow in the turn."""
        self._now("answering", "")
        tickets = []
        for side, answer in enumerate(turn.answers):
            ticket = self._client.ask(do, on_progress=partial(self._grow, answer), side=side, **question(side))
            tickets.append(ticket)
            ticket.add_done_callback(partial(self._answered, turn, answer))
        return tickets

    def _grow(self, answer: Answer, message: dict[str, Any]) -> None:
        answer.text += message["text"]
        answer.tokens = message["tokens"]
        self._changed()

    def _answered(self, turn: Turn, answer: Answer, ticket: Ticket) -> None:
        if ticket.error is not None:
            answer.problem = ticket.error.full_message
        else:
            result = answer.result = ticket.result()
            answer.ended, answer.tokens = result.get("ended", ""), result.get("tokens", 0)
            if "score" in result:
                answer.text = f"{result['score']:.4f}"
            elif "order" in result:
                answer.text = "\n".join(f"{one['similarity']:+.4f}  {one['text']}" for one in result["order"])
            else:
                answer.text = result["text"]
        answer.done = True
        with self._lock:
            if self.state == "answering" and all(each.done for each in turn.answers):
                if self.pid is None:  # the process died: what failed says so, and another text loads anew
                    self.problem = answer.problem
                    self._now("failed", "")
                    return
                self._now("ready", "")
                return
        self._changed()

    def prompt(self, side: int, text: str = "") -> Ticket:
        """The exact text that this side reads next, with `text` as the next turn: `text`, `ids`, `tokens`."""
        messages = self.conversation.messages(side)
        if text:
            if not self.conversation.has_template:
                messages = [one for one in messages if one["role"] == "system"]
            messages.append({"role": "user", "content": text})
        elif messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages or messages[-1]["role"] == "system":
            raise UsageError("there is no text yet that the model could read.")
        return self._client.ask("prompt", side=side, messages=messages, tools=self.conversation.tools)


def _environment(run: RunFolder, device: str) -> tuple[dict[str, str], list[str]]:
    """What the chat's process is given of its device, and what a person should know about that."""
    if device not in ("auto", "cpu"):
        raise UsageError(f"--device: must be auto or cpu; got {visible(device)[:40]}.")
    live = devices_of_live(run.path.parent, leaving=False)
    taken = {name for names in live.values() for name in names}
    choice = devices.choose("auto", taken) if device == "auto" else devices.Choice((), 1)
    notes: list[str] = []
    beside = [name for name, names in live.items() if set(names) & set(choice.visible) or not (names or choice.visible)]
    if beside:
        where = f"GPU {choice.visible[0]}" if choice.visible else "the CPU"
        notes.append(f"{visible(beside[0])} is training on {where} too: both share its memory and are slower.")
    threads = os.environ.get("OMP_NUM_THREADS") or str(devices.cores())
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(choice.visible), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {**environment, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}, notes


def tools_from(path: Path) -> list[Any]:
    """The tools of a JSON file, a list of descriptions as chat templates take them. Raises UsageError."""
    shown = visible(str(path))
    try:
        tools = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no JSON"
        raise UsageError(
            f"--tools: {shown} cannot be read: {reason}.", "Name a JSON file with a list of tools."
        ) from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError(f"--tools: {shown} must hold a list of tools, each an object.")
    return tools
