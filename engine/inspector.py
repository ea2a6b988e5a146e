"""The answering process: `python -P -m engine.inspector`, JSON lines in and out, for what needs torch.

The main thread only reads and cancels, so it always answers. One other thread keeps what is worth keeping warm
(imports, tokenizers, row indexes) and forks a child for each question; children do the work under limits of time and
memory, and cancelling one kills it. Libraries that print write to the log, not into the protocol. Ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from engine.errors import Cancelled, WorkbenchError, redact

Params = dict[str, Any]
Report = Callable[[str, int, int], None]

PREVIEW_SECONDS = 30
PREVIEW_MEMORY = 2 << 30
PROGRESS_EVERY = 0.1


@dataclass
class Task:
    """One question on its way: waiting, or running in the child `pid`."""

    number: int
    params: Params
    pid: int | None = None
    cancelled: bool = False


class Answers:
    """Writes whole lines to the real standard output, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock = descriptor, threading.Lock()

    def send(self, number: int, **payload: Any) -> None:
        line = json.dumps({"id": number, **payload}, default=str, ensure_ascii=True).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._descriptor, line) :]

    def fail(self, number: int, problem: BaseException) -> None:
        self.send(number, error=describe(problem))


def describe(problem: BaseException) -> dict[str, str]:
    """A problem as its person sees it; one that we did not foresee names its type."""
    if isinstance(problem, WorkbenchError):
        return {"message": problem.message, "hint": problem.hint, "kind": type(problem).__name__}
    if isinstance(problem, MemoryError):
        return {"message": "this needs more memory than the preview may use", "hint": "", "kind": "MemoryError"}
    text = redact(str(problem)).strip().splitlines()
    message = f"{type(problem).__name__}: {text[0] if text else 'no message'}"
    return {"message": message, "hint": "", "kind": type(problem).__name__}


# -- main thread: read and cancel --------------------------------------------------------------------------------------
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
    with os.fdopen(os.dup(0), "rb") as questions:
        for line in questions:
            try:
                asked = json.loads(line)
                number = int(asked["id"])
            except (ValueError, KeyError, TypeError) as problem:
                answers.fail(-1, problem)
                continue
            if asked.get("do") == "cancel":
                _cancel(tasks, number, answers)
                continue
            task = Task(number, asked)
            tasks[number] = task
            waiting.put(task)
    for task in list(tasks.values()):
        if task.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(task.pid, signal.SIGKILL)
    os._exit(0)


def _cancel(tasks: dict[int, Task], number: int, answers: Answers) -> None:
    task = tasks.pop(number, None)
    if task is None:
        return
    task.cancelled = True
    if task.pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(task.pid, signal.SIGKILL)
    answers.fail(number, Cancelled("cancelled"))


# -- worker thread: keep warm, fork -------------------------------------------------------------------------------------
def _work(waiting: queue.Queue[Task], tasks: dict[int, Task], answers: Answers) -> None:
    warm = Warm()
    while True:
        task = waiting.get()
        if task.cancelled:
            continue
        try:
            job = _job(warm, task.params)
            if isinstance(job, Job):
                threading.Thread(target=_relay, args=(_fork(job, task), job, task, tasks, answers), daemon=True).start()
            elif not task.cancelled:
                answers.send(task.number, result=job)
                tasks.pop(task.number, None)
        except Exception as problem:  # noqa: BLE001 - the process boundary: the error belongs to its question
            if not task.cancelled:
                answers.fail(task.number, problem)
            tasks.pop(task.number, None)


@dataclass
class Job:
    """Work for a child; `report` may be called often. Limits are for what strangers' templates may use."""

    run: Callable[[Report], Any]
    seconds: int | None = None
    memory: int | None = None
    learn: Callable[[Any], None] | None = None
    """Told the child's result here, where it can be kept for the questions to come."""


def _fork(job: Job, task: Task) -> int:
    """Start the child; the descriptor that its messages come from."""
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writing)
        task.pid = pid
        if task.cancelled:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return reading
    code = 1
    try:
        os.close(reading)
        _die_with(parent)
        _limit(job)
        _child(job, task.number, writing)
        code = 0
    finally:
        os._exit(code)


def _child(job: Job, number: int, writing: int) -> None:
    answers, last = Answers(writing), [0.0]

    def report(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] >= PROGRESS_EVERY or done >= total:
            last[0] = now
            answers.send(number, progress={"what": what, "done": done, "total": total, "unit": "rows"})

    try:
        result = job.run(report)
    except BaseException as problem:  # noqa: BLE001 - the process boundary: the error belongs to its question
        answers.fail(number, problem)
    else:
        answers.send(number, result=result)


def _die_with(parent: int) -> None:
    """On Linux the kernel ends the child when the inspector is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _limit(job: Job) -> None:
    if job.seconds:
        resource.setrlimit(resource.RLIMIT_CPU, (job.seconds, job.seconds + 1))
    if job.memory and sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + job.memory, used + job.memory))


def _relay(reading: int, job: Job, task: Task, tasks: dict[int, Task], answers: Answers) -> None:
    """Pass the child's lines on; a child that dies without an answer is an answer too."""
    answered = False
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if not task.cancelled and line.endswith(b"\n"):
                message = json.loads(line)
                answered = answered or "progress" not in message
                if job.learn and "result" in message:
                    job.learn(message["result"])
                answers.send(message.pop("id"), **message)
    assert task.pid is not None
    _, status = os.waitpid(task.pid, 0)
    task.pid = None
    tasks.pop(task.number, None)
    if not answered and not task.cancelled:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        over = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        why = f"it took more than {PREVIEW_SECONDS} seconds of computing or too much memory" if over else how
        answers.fail(task.number, WorkbenchError(f"the {task.params.get('do')} ended without an answer: {why}"))


# -- what stays warm ---------------------------------------------------------------------------------------------------
class Warm:
    """Processing classes and opened data by what they were made from."""

    def __init__(self) -> None:
        self._processing: dict[str, Any] = {}
        self._plans: dict[str, Any] = {}
        self._rows: dict[tuple[str, float, int], Any] = {}

    def processing_class(self, config: Any) -> Any:
        from engine.models.load import load_processing_class

        key = json.dumps([config.model.name, config.model.tokenizer, config.model.revision], default=str)
        if key not in self._processing:
            self._processing[key] = load_processing_class(config)
        return self._processing[key]

    def plan(self, config: Any, processing_class: Any, split: str) -> Any:
        """The opened data of a config; kept while neither the config nor a file changes, so row indexes stay."""
        from engine.data.plan import plan_of

        files = [_stamp(source.path) for source in (config.data.train if split == "train" else config.data.eval)]
        key = json.dumps([config.model_dump(), files, split], default=str, sort_keys=True)
        if key not in self._plans:
            while len(self._plans) >= 4:
                old = self._plans.pop(next(iter(self._plans)))
                for source in old.sources:
                    source.rows.close()
            self._plans[key] = plan_of(config, processing_class, split)
        return self._plans[key]

    def rows(self, path: str, split: str | None) -> Any:
        from engine.data.plan import source_rows

        stamp = (f"{path} {split}", *_stamp(path))
        if stamp not in self._rows:
            while len(self._rows) >= 4:
                self._rows.pop(next(iter(self._rows))).close()
            self._rows[stamp] = source_rows(path, split)
        return self._rows[stamp]


def _stamp(path: str) -> tuple[float, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0.0, 0
    return status.st_mtime, status.st_size


# -- the questions -----------------------------------------------------------------------------------------------------
def _job(warm: Warm, params: Params) -> Any:
    """The answer itself, or a `Job` for a child. Runs on the worker thread."""
    questions: dict[str, Callable[[Warm, Params], Any]] = {
        "hello": _hello,
        "rows": _raw_rows,
        "detect": _detect,
        "model": _model,
        "preview": _preview,
        "data": _data,
        "estimate": _estimate,
    }
    do = str(params.get("do"))
    if do not in questions:
        raise WorkbenchError(f"the inspector knows no {do}; it knows {', '.join(questions)}")
    return questions[do](warm, params)


def _hello(warm: Warm, params: Params) -> Any:
    """That it is there; with `warm` the libraries are imported now, so that the first preview is quick."""
    if params.get("warm"):
        import engine.data.preview
        import engine.models.load  # noqa: F401
    return {"pid": os.getpid(), "python": sys.version.split()[0], "nice": os.nice(0)}


def _raw_rows(warm: Warm, params: Params) -> Any:
    """Rows as they stand in the source, without torch: `path`, `start`, `count`."""
    rows = warm.rows(str(params["path"]), params.get("split"))
    start, count = int(params.get("start", 0)), int(params.get("count", 20))
    shown = []
    for index in range(start, start + count):
        try:
            shown.append({"index": index, "text": rows.text(index, 4096), "line": rows.place(index)[1]})
        except IndexError:
            break
    return {"rows": shown, "total": rows.length, "indexed": rows.progress, "note": rows.note, "kind": rows.kind}


def _detect(warm: Warm, params: Params) -> Any:
    """The format of one source, without torch: `path`, `format`, `columns`."""
    from engine.data.detect import detect

    rows = warm.rows(str(params["path"]), params.get("split"))
    found = asdict(detect(rows, params.get("columns") or {}, params.get("format")))
    return {**found, "rows": rows.length, "indexed": rows.progress}


def _model(warm: Warm, params: Params) -> Any:
    """What is known of a model: the facts of its config, its tokenizer and its chat template."""
    from engine.config.facts import model_facts
    from engine.data.chat import GENERATION
    from engine.data.plan import template_of

    mapping = dict(params.get("config") or {"model": {"name": params["name"]}})
    config = _config({**params, "config": mapping})
    facts = model_facts(config.model.name)
    processing_class = warm.processing_class(config)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    template, name = template_of(config, processing_class)
    return {
        "name": config.model.name,
        "facts": asdict(facts) if is_dataclass(facts) and not isinstance(facts, type) else None,
        "tokenizer": {
            "class": type(tokenizer).__name__,
            "size": len(tokenizer),
            "eos_token": tokenizer.eos_token,
            "bos_token": tokenizer.bos_token,
            "pad_token": tokenizer.pad_token,
            "exact_masks": bool(getattr(tokenizer, "is_fast", False)),
        },
        "template": {"name": name, "text": template, "marks": bool(template and GENERATION.search(template))},
    }


def _preview(warm: Warm, params: Params) -> Any:
    from engine.data.preview import choose, preview

    config, split = _config(params), str(params.get("split", "train"))
    processing_class = warm.processing_class(config)
    wanted, count = dict(params.get("rows") or {"kind": "index", "index": 0}), int(params.get("count", 1))
    kind = wanted.get("kind", "index")
    if config.data.packing or kind in ("worst", "search"):
        return Job(lambda report: preview(config, processing_class, wanted, count, split, report))
    plan = warm.plan(config, processing_class, split)
    # The index grows in this process: what a child reads, rows and line numbers, must be known before it is forked.
    places = choose(config, processing_class, plan, wanted, count, None)
    for number, index in places:
        plan.sources[number].rows.size(index)
        plan.sources[number].rows.place(index)

    def learn(found: Any) -> None:
        # A fingerprint tokenizes 16 rows, most of what a preview of one row computes; it is empty while it is not known.
        if found["fingerprint"]:
            plan.told = (found["fingerprint"], found["warnings"])

    return Job(
        lambda report: preview(config, processing_class, wanted, count, split, report, plan, places),
        PREVIEW_SECONDS,
        PREVIEW_MEMORY,
        learn,
    )


def _data(warm: Warm, params: Params) -> Any:
    """Counts of both splits over all rows, prepared and cached on the way."""
    config = _config(params)
    processing_class = warm.processing_class(config)

    def run(report: Report) -> Any:
        from engine.data.prepare import prepare

        found = prepare(config, processing_class, "train", report)
        facts = {**asdict(found.facts), "counts": found.counts, "warnings": list(found.warnings)}
        facts |= {"fingerprint": found.fingerprint, "cached": found.cached}
        if config.data.eval:
            held_out = prepare(config, processing_class, "eval", report)
            facts["eval_rows"] = held_out.facts.eval_rows
            facts["warnings"] += [f"held-out data: {warning}" for warning in held_out.warnings]
        return facts

    return Job(run)


def _estimate(warm: Warm, params: Params) -> Any:
    """The closed-form estimate of a config on this machine; `engine.run.rehearsal` measures, in a process of its own."""
    from engine.data.look import look_at
    from engine.memory.estimate import estimate

    config = _config(params)
    return estimate(config, look_at(config)).as_json()


def _config(params: Params) -> Any:
    """The config of a question, with its paths made absolute from `base`."""
    from engine.config.files import absolute
    from engine.config.reading import read

    mapping = params.get("config") or {}
    if params.get("base"):
        mapping = absolute(mapping, params["base"])
    reading = read(mapping)
    for finding in reading.findings:
        # A default in the place of a bad value would show other tokens than the person asked for.
        if finding.path in reading.invalid and finding.path.split(".")[0] in ("model", "method", "data"):
            raise WorkbenchError(finding.message)
    return reading.config


if __name__ == "__main__":
    serve()
