"""The process that samples answers beside the training, from the training's end: prompts out, answers in, adapters as files.

It is `engine.trainers.generating`, with the run's model by the run's config. The adapter reaches it as a file of safetensors in the
run's folder, put in place at once; each question names the file, its SHA-256 and the steps its weights had made, so that what
answers is what was asked. A process that dies, hangs or answers something else is replaced and asked again, with the same adapter
and the same seeds; one that cannot answer twice in a row ends the run with one sentence.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save
from transformers import PreTrainedModel, TrainerState

from engine import figures
from engine.errors import WorkbenchError, redact, visible
from engine.run import inside
from engine.run.async_writer import AsyncWriter
from engine.run.disk import guarded
from engine.run.spawn import ALL_CARDS, TOKEN, other_card, safe_python, without_tokens
from engine.run.store import RunFolder

PLACE = "method.async_prefetch"
FOLDER = "generation"
"""Of the run, where the adapters lie that are being answered by."""
COMMAND = ("-m", "engine.trainers.generating")
LOAD_SECONDS = 1800.0
LOOK = 0.2
"""Seconds after which a process that is silent is asked whether it still lives."""
ATTEMPTS = 2
LONGEST_ANSWER = 1 << 30
_OFFLINE = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
"""The training has loaded the model before: all of it is here, and no token is needed."""

_STARTING = threading.Lock()
"""Held while a process is started. One that another thread forks meanwhile, such as those that read rows, would hold the pipe whose
end tells that the started one runs, and who starts it would wait for as long as that lives."""
os.register_at_fork(
    before=_STARTING.acquire, after_in_parent=_STARTING.release, after_in_child=_STARTING.release
)  # a process that is started by `subprocess` is no fork in this sense

Value = TypeVar("Value")


class Answers(NamedTuple):
    """Answers as ids and the log-probabilities of their tokens, one list an answer."""

    ids: list[list[int]]
    logps: list[list[float]]


class Question(Protocol):
    """What is asked: the ids of prompts, one list an answer, and the seed to draw by."""

    @property
    def prompts(self) -> list[list[int]]: ...

    @property
    def seed(self) -> int: ...


class Trainer(Protocol):
    """The trainer, as far as it is asked here."""

    model: PreTrainedModel | PeftModel
    run: RunFolder
    writer: AsyncWriter | None
    state: TrainerState
    accelerator: Any


def adapter_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The weights of the trainer's adapter where they lie, by the names that PEFT gives them in a file."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    assert isinstance(model, PeftModel)
    return {
        name: weight.detach() for name, weight in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }


def answered(value: Value) -> Future[Value]:
    """What is there already, as something under way."""
    future: Future[Value] = Future()
    future.set_result(value)
    return future


@dataclass(frozen=True)
class Adapter:
    """An adapter's file: its name in the run's folder, its SHA-256, and how many steps its weights had made."""

    file: str
    sha256: str
    step: int


class Failed(Exception):
    """Why a process did not answer, in words that follow "the process that samples answers"."""


class GeneratingProcess:
    """The source of answers that are sampled beside the training. `timeout` in seconds for one sampling; the adapter is sent
    anew once `every` steps are made. `card` is the number of its GPU; None shares the training's."""

    def __init__(self, trainer: Trainer, timeout: float, every: int, card: int | None = None) -> None:
        self._card = card
        self._trainer, self._timeout, self._every = trainer, timeout, every
        self._asking = ThreadPoolExecutor(1, "answers")
        self._process: _Process | None = None
        self._adapter: Adapter | None = None
        self._used: list[tuple[Future[Answers], Adapter]] = []
        self._closing = False
        self._lock = threading.Lock()
        self._threads = torch.get_num_threads()
        often = "each step" if every == 1 else f"every {every} steps"
        where = "" if card is None else f" on GPU {card}"
        self.note = f"answers are sampled by a process of its own{where}, which is given the adapter {often}"

    # -- the source's moments ------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Has the process load the model; on a CPU it takes half the threads of this one."""
        if self._on_cpu and self._threads > 1:
            torch.set_num_threads(self._threads - self._share)
        self._asking.submit(self._ready)

    def prepare(self, step: int) -> int:
        if self._adapter is None or step - self._adapter.step >= self._every:
            self._publish(step)
        assert self._adapter is not None
        return self._adapter.step

    def begin(self, asked: Question) -> Future[Answers]:
        assert self._adapter is not None
        future = self._asking.submit(self._answer, asked, self._adapter)
        self._used.append((future, self._adapter))
        return future

    def state(self) -> dict[str, Any]:
        """The adapter that was sent last, where the next one may not be due yet: [bytes] of its file, in uint8."""
        if self._adapter is None or self._every == 1:
            return {}
        data = bytearray(inside.read(self._trainer.run, self._adapter.file))
        return {"step": self._adapter.step, "file": torch.frombuffer(data, dtype=torch.uint8)}

    def load(self, state: dict[str, Any]) -> None:
        if state:
            self._send(state["step"], state["file"].numpy().tobytes())

    def close(self) -> None:
        """Ends the process, whatever it does, and removes the adapters' files."""
        with self._lock:
            self._closing = True
            if self._process is not None:
                self._process.end()
        self._asking.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(self._threads)
        self._used.clear()
        self._remove_but(())
        with contextlib.suppress(OSError):
            os.rmdir(self._trainer.run.path / FOLDER)

    # -- adapters ------------------------------------------------------------------------------------------------------
    def _publish(self, step: int) -> None:
        """Sends the adapter as it is."""
        weights = adapter_weights(self._trainer)
        self._send(step, save({name: weight.cpu().contiguous() for name, weight in weights.items()}))

    def _send(self, step: int, data: bytes) -> None:
        """Writes an adapter's file, and removes those that nothing under way answers by. Raises StorageError."""
        run, file = self._trainer.run, f"{FOLDER}/adapter-{step}.safetensors"

        def write() -> None:
            inside.make_folder(run, FOLDER, exist_ok=True)
            inside.replace(run, file, data, durable=False)

        guarded(run.path / file, lambda: f"{figures.size(len(data))} needed", write)
        self._adapter = Adapter(file, hashlib.sha256(data).hexdigest(), step)
        self._used = [each for each in self._used if not each[0].done()]
        self._remove_but((self._adapter.file, *(adapter.file for _, adapter in self._used)))

    def _remove_but(self, kept: tuple[str, ...]) -> None:
        run = self._trainer.run
        if not inside.exists(run, FOLDER):
            return
        for name in inside.names(run, FOLDER):
            if f"{FOLDER}/{name}" not in kept:
                inside.remove(run, f"{FOLDER}/{name}")

    # -- questions, by a thread ----------------------------------------------------------------------------------------
    @property
    def _device(self) -> str:
        return str(self._trainer.accelerator.device.type)

    @property
    def _on_cpu(self) -> bool:
        return self._device == "cpu"

    @property
    def _share(self) -> int:
        """Threads of the generating process on a CPU."""
        return max(1, self._threads // 2)

    def _ready(self) -> _Process:
        """The process, started where there is none. Raises Failed where none can be."""
        with self._lock:
            if self._closing:
                raise Failed("was not wanted any more")
            if self._process is None:
                self._process = _Process(
                    self._trainer.run.path, self._device, max(self._timeout, LOAD_SECONDS), self._environment()
                )
            process = self._process
        process.loaded()
        return process

    def _environment(self) -> dict[str, str]:
        """What is the process's own: its threads, or its GPU. Raises WorkbenchError where there is no such GPU."""
        if self._on_cpu:
            return {"OMP_NUM_THREADS": str(self._share)}
        if self._card is None:
            return {}
        if not (name := other_card(self._card, os.environ)):
            raise WorkbenchError(
                f"method.generation_device: there is no GPU {self._card} here; CUDA_VISIBLE_DEVICES allows "
                f"{os.environ.get(ALL_CARDS, '')}.",
                "Name one of these by its place in that list, counted from 0, or leave it out.",
            )
        return {"CUDA_VISIBLE_DEVICES": name}

    def _answer(self, asked: Question, adapter: Adapter) -> Answers:
        """Raises WorkbenchError where no process answers."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._ready().ask(asked, adapter, self._timeout)
            except Failed as problem:
                self._give_up()
                what = f"{PLACE}: the process that samples answers {problem}"
                if self._closing or attempt == ATTEMPTS:
                    raise WorkbenchError(
                        f"{what}, for the second time in a row.",
                        "What it printed is in the run's log. With rewards in its place answers are sampled by the training itself.",
                    ) from None
                self._tell(f"{what}. It was started anew and is asked again.")
        raise AssertionError

    def _give_up(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def _tell(self, message: str) -> None:
        if (writer := self._trainer.writer) is not None:
            writer.write("finding", path=PLACE, severity="warning", rule="generating-process-replaced", message=message)


class _Process:
    """One process. Its answers are believed only as answers to what it was asked last."""

    def __init__(self, run: Path, device: str, load_seconds: float, more: dict[str, str]) -> None:
        self._device = device
        environment = {**without_tokens(os.environ, (TOKEN,)), **safe_python(os.environ), **_OFFLINE, **more}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            environment.pop(name, None)
        command = [sys.executable, "-P", *COMMAND, str(run)]
        with _STARTING:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout
        os.set_blocking(self._in.fileno(), False)
        self._unread = b""
        self._ready: dict[str, Any] | None = None
        """What it said once it had loaded the model, or had failed to."""
        self._begun, self._load_seconds = time.monotonic(), load_seconds

    def loaded(self) -> None:
        """Waits until it has loaded the model. Raises Failed; WorkbenchError for a model that it cannot load."""
        if self._ready is None:
            late = f"did not load the model within {self._load_seconds:g} seconds"
            self._ready = self._answer("ready", self._begun + self._load_seconds, late)
        self._refused(self._ready)
        if (found := self._ready.get("device")) != self._device:
            raise WorkbenchError(
                f"{PLACE}: the process that samples answers has {found} to compute with, and the training {self._device}.",
                "Name a GPU that is there as method.generation_device, or leave it out.",
            )

    def ask(self, asked: Question, adapter: Adapter, seconds: float) -> Answers:
        """Its answers. Raises Failed as above, WorkbenchError for what went wrong in it."""
        mark = secrets.token_hex(8)
        named = {"file": adapter.file, "sha256": adapter.sha256, "step": adapter.step}
        line = json.dumps({"mark": mark, "prompts": asked.prompts, "seed": asked.seed, "adapter": named})
        until, late = time.monotonic() + seconds, f"did not answer within {seconds:g} seconds"
        self._write(line.encode() + b"\n", until)
        answer = self._answer(mark, until, late)
        self._refused(answer)
        ids: Any = answer.get("ids")
        logps: Any = answer.get("logps")
        if not (_like(ids, asked.prompts, int) and _like(logps, ids, float, equal=True)):
            raise Failed("wrote something else than answers")
        return Answers(ids, logps)

    def _refused(self, answer: dict[str, Any]) -> None:
        if "problem" in answer:
            sentence = visible(redact(str(answer["problem"])))
            raise WorkbenchError(
                f"{PLACE}: the process that samples answers: {sentence}", "Its traceback is in the run's log."
            )

    def _answer(self, mark: str, until: float, late: str) -> dict[str, Any]:
        try:
            line = self._line(until)
        except TimeoutError:
            raise Failed(late) from None
        except (OSError, ValueError):  # closed by who ends it
            line = b""
        if not line:
            raise Failed(f"ended by itself ({_how(self.process)})")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("mark") != mark:
            raise Failed("wrote something else than answers")
        return answer

    def _write(self, data: bytes, until: float) -> None:
        """Writes as much as it takes until then; what became of one that does not read, reading says."""
        left = memoryview(data)
        with selectors.DefaultSelector() as selector, contextlib.suppress(BrokenPipeError):
            selector.register(self._in, selectors.EVENT_WRITE)
            while left and time.monotonic() < until and self.process.poll() is None:
                if selector.select(LOOK):
                    with contextlib.suppress(BlockingIOError):
                        left = left[os.write(self._in.fileno(), left) :]

    def _line(self, until: float) -> bytes:
        """One line; empty when the process has ended."""
        pipe = self._out.fileno()
        while b"\n" not in self._unread:
            ended = self.process.poll() is not None
            if wait([pipe], 0 if ended else max(0.0, min(LOOK, until - time.monotonic()))):
                data = os.read(pipe, 1 << 16)
                if not data or len(self._unread) > LONGEST_ANSWER:
                    return b""
                self._unread += data
            elif ended:
                return b""
            elif time.monotonic() >= until:
                raise TimeoutError
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def end(self) -> None:
        """Ends it at once, and what it started (a compiler's processes); its pipes are closed once nobody reads them any more."""
        if self.process.poll() is None:  # not yet waited for, so the group is still its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _how(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    code = process.returncode
    return "it still runs" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"


def _like(found: Any, rows: Any, kind: type, *, equal: bool = False) -> bool:
    """Whether these are as many lists of such numbers as there are rows; with `equal` as long as each. None is empty."""
    return (
        isinstance(found, list)
        and len(found) == len(rows)
        and all(
            isinstance(each, list)
            and each
            and all(type(value) is kind for value in each)
            and (not equal or len(each) == len(row))
            for each, row in zip(found, rows, strict=True)
        )
    )
