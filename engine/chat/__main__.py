"""The chat's own process: `python -P -m engine.chat`, JSON lines in and out as the inspector speaks them.

The main thread only reads, so that the stop key is heard while a model loads or answers; one other thread holds the
models and does one thing after the other. It ends with the window, also when that is killed: standard input ends then,
and where something else holds its other end open, the parent is another.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import UsageError
from engine.inspector.answers import Answers

LOOK_SECONDS = 0.5


class Task:
    """One question, and whether its person gave it up."""

    def __init__(self, number: int, params: Mapping[str, Any]) -> None:
        self.number, self.params = number, params
        self.stopped = threading.Event()


class Chat:
    """What the working thread holds."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._sides: list[Any] = []

    def answer_to(self, task: Task) -> Any:
        """The result of a question; progress goes out while it is made. Raises WorkbenchError."""
        known: dict[str, Callable[[Task], Any]] = {
            "load": self._load,
            "answer": self._answer,
            "prompt": self._prompt,
            "score": self._score,
            "rank": self._rank,
        }
        act = known.get(str(task.params.get("do")))
        if act is None:
            raise UsageError(f"the chat knows no question {task.params.get('do')!r}.")
        return act(task)

    def _load(self, task: Task) -> dict[str, Any]:
        began = time.monotonic()
        self._sides = []

        def emit_phase(phase: str) -> None:
            self._answers.send(task.number, progress={"phase": phase, "seconds": time.monotonic() - began})

        emit_phase("Starting")
        from engine.chat.models import load_sides

        sides = load_sides(task.params["sides"], emit_phase)
        from engine.chat.answering import summary
        from engine.models.sizes import bytes_of

        weights = (weight for side in sides for weight in (*side.model.parameters(), *side.model.buffers()))
        held = dict(map(bytes_of, weights))
        self._sides = sides
        return {
            "sides": [summary(side) for side in sides],
            "models": len({id(side.model) for side in sides}),
            "bytes": sum(held.values()),
            "seconds": time.monotonic() - began,
        }

    def _side(self, task: Task) -> Any:
        if not self._sides:
            raise UsageError("the chat has loaded no model yet.")
        return self._sides[int(task.params["side"])]

    def _answer(self, task: Task) -> dict[str, Any]:
        from engine.chat.answering import Sampling, answer

        def emit(text: str, tokens: int) -> None:
            self._answers.send(task.number, progress={"text": text, "tokens": tokens})

        params = task.params
        sampling = Sampling(**params.get("sampling") or {})
        return answer(self._side(task), params["messages"], params.get("tools") or [], sampling, emit, task.stopped)

    def _prompt(self, task: Task) -> dict[str, Any]:
        from engine.chat.answering import rendered

        text, ids = rendered(self._side(task), task.params["messages"], task.params.get("tools") or [])
        return {"text": text, "ids": ids, "tokens": len(ids)}

    def _score(self, task: Task) -> dict[str, Any]:
        from engine.chat.answering import score

        return score(self._side(task), task.params["messages"], str(task.params["answer"]))

    def _rank(self, task: Task) -> dict[str, Any]:
        from engine.chat.answering import rank

        return rank(self._side(task), str(task.params["query"]), list(map(str, task.params["texts"])))


def serve() -> None:
    """Answer until the parent is gone."""
    answers = Answers(os.dup(1))
    # Whatever a library prints goes to the log, so that the protocol stays whole.
    os.dup2(2, 1)
    tasks: dict[int, Task] = {}
    waiting: queue.Queue[Task] = queue.Queue()
    threading.Thread(target=_work, args=(waiting, tasks, answers), name="work", daemon=True).start()
    threading.Thread(target=_end_with, args=(os.getppid(),), name="parent", daemon=True).start()
    for number, asked in answers.questions(0):
        if asked.get("do") == "stop":
            for task in list(tasks.values()):
                task.stopped.set()
            answers.send(number, result={})
        elif asked.get("do") == "cancel":
            if number in tasks:
                tasks[number].stopped.set()
        else:
            tasks[number] = Task(number, asked)
            waiting.put(tasks[number])
    os._exit(0)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(0)


def _work(waiting: queue.Queue[Task], tasks: dict[int, Task], answers: Answers) -> None:
    chat = Chat(answers)
    while True:
        task = waiting.get()
        try:
            answers.send(task.number, result=chat.answer_to(task))
        except Exception as problem:  # noqa: BLE001 - the process boundary: the error belongs to its question
            answers.fail(task.number, problem)
        tasks.pop(task.number, None)


if __name__ == "__main__":
    serve()
