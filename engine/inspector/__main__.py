"""The answering process: `python -P -m engine.inspector`, JSON lines in and out, for what needs torch.

The main thread only reads and cancels, so it always answers. One other thread keeps what is worth keeping warm
(imports, tokenizers, row indexes) and forks a child for each question; children do the work under limits of time and
memory, and cancelling one kills it. Libraries that print write to the log, not into the protocol. Ends with its parent.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading

from engine.errors import Cancelled
from engine.inspector.answers import Answers
from engine.inspector.children import Job, Task, fork, relay
from engine.inspector.questions import answer_to
from engine.inspector.warm import Warm


def serve() -> None:
    """Read questions until the parent is gone."""
    answers = Answers(os.dup(1))
    # Whatever a library prints goes to the log, so that the protocol stays whole.
    os.dup2(2, 1)
    with contextlib.suppress(OSError):
        os.nice(19)
    tasks: dict[int, Task] = {}
    waiting: queue.Queue[Task] = queue.Queue()
    worker = threading.Thread(target=_work, args=(waiting, tasks, answers), name="work", daemon=True)
    worker.start()
    for number, asked in answers.questions(0):
        if asked.get("do") == "cancel":
            _cancel(tasks, number, answers)
            continue
        task = Task(number, asked)
        tasks[number] = task
        waiting.put(task)
    for task in list(tasks.values()):
        task.kill()
    os._exit(0)


def _cancel(tasks: dict[int, Task], number: int, answers: Answers) -> None:
    task = tasks.pop(number, None)
    if task is None:
        return
    task.cancelled = True
    task.kill()
    answers.fail(number, Cancelled("cancelled"))


def _work(waiting: queue.Queue[Task], tasks: dict[int, Task], answers: Answers) -> None:
    warm = Warm()
    while True:
        task = waiting.get()
        if task.cancelled:
            continue
        try:
            job = answer_to(warm, task.params)
            if isinstance(job, Job):
                threading.Thread(target=relay, args=(fork(job, task), job, task, tasks, answers), daemon=True).start()
            elif not task.cancelled:
                answers.send(task.number, result=job)
                tasks.pop(task.number, None)
        except Exception as problem:  # noqa: BLE001 - the process boundary: the error belongs to its question
            if not task.cancelled:
                answers.fail(task.number, problem)
            tasks.pop(task.number, None)


if __name__ == "__main__":
    serve()
