"""Runs as their workers leave them, with events at fixed times, so that every picture is the same."""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.run import checkpoint, launch
from engine.run.store import RunFolder, create

HOSTILE = "\x1b]0;owned\x07\x1b[31m[/b][@click=app.quit]x[/]\u202e"
BEGAN = 1_795_000_000.0
EVENT = {"v": 1, "rank": 0, "segment": 0}
ENDS: dict[str, dict[str, Any]] = {
    "finished": {"step": 60, "seconds": 12.0},
    "stopped": {"step": 60, "by": "anna"},
    "failed": {
        "cause": "cuda_oom",
        "message": f"The GPU ran out of memory at 79.2 GiB {HOSTILE}",
        "lines": ['  File "trainer.py", line 12, in training_step', f"OutOfMemoryError: tried 2.10 GiB {HOSTILE}"],
    },
}


class Writer:
    """Appends events with the times a test wants."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.seq = run, -1
        self.segment = 0

    def write(self, kind: str, t: float, **payload: Any) -> None:
        self.seq += 1
        event = {**EVENT, "segment": self.segment, "seq": self.seq, "t": BEGAN + t, "kind": kind, **payload}
        with open(self.run.events, "a", encoding="utf-8") as file:
            file.write(json.dumps(event, separators=(",", ":")) + "\n")


def metrics(method: str, step: int, steps: int) -> dict[str, float]:
    share = step / steps
    found = {
        "loss": 2 * math.exp(-4 * share) + 0.05 + 0.03 * math.sin(step),
        "grad_norm": 0.5 + 0.2 * math.sin(step * 1.7),
        "learning_rate": 1e-4 * (1 - share),
        "tokens_per_second": 9812.0 + step,
        "step_seconds": 0.208,
        "data_seconds": 0.001,
        "tokens": 2048.0 * step,
        "memory_allocated": float(19 << 30),
        "memory_peak": float(20 << 30),
        "mfu": 0.341,
    }
    if method == "dpo":
        found |= {"rewards/margins": 1.5 * share + 0.1 * math.sin(step), "rewards/accuracies": 0.5 + share / 2}
    return found


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunFolder]:
    """`make_run(state, steps=60, method="sft", name="dates")` writes a run into `tmp_path / "runs"`."""
    monkeypatch.setattr(launch, "unattended", lambda run: False)  # no supervisor is brought in for these

    def make(
        state: str = "running",
        *,
        steps: int = 60,
        method: str = "sft",
        name: str = "dates",
        config: str = "version: 1\n",
        hostile: str = "",
    ) -> RunFolder:
        run = create(tmp_path / "runs", config, {"name": name, "method": method, "model": f"builtin/tiny{hostile}"})
        writer = Writer(run)
        if state != "queued":
            writer.write("phase", 0, name="Loading the model")
        if state == "starting":
            writer.write("progress", 1, what="reading weights", done=2 << 30, total=4 << 30, unit="bytes")
        elif state != "queued":
            _train(writer, method, steps, hostile)
            for step in range(20, steps + 1, 20) if state == "finished" else ():
                (checkpoint.begin(run, step) / "model.safetensors").touch()
                checkpoint.commit(run.checkpoints / f"checkpoint-{step}.tmp", {})
            if state in ENDS:
                writer.write(state, steps * 0.2 + 1, **ENDS[state])
            elif state == "stopping":
                writer.write(
                    "control", steps * 0.2 + 1, id="x", do="save_stop", status="accepted", message="after this step"
                )
        run.log.write_text("".join(f"step {step} went well {hostile}\n" for step in range(1, steps + 1)))
        run.batches.write_bytes(array("q", range(4 * steps)).tobytes())
        run.update_json(state={"stopping": "running"}.get(state, state), created=time.time())
        return run

    return make


def _train(writer: Writer, method: str, steps: int, hostile: str) -> None:
    entry = {"feature": f"adapter{hostile}", "requested": "lora", "effective": "lora r=16", "count": 14, "detail": ""}
    writer.write(
        "receipt", 1, entries=[entry, {**entry, "feature": "attention", "requested": "auto", "effective": "sdpa"}]
    )
    writer.write("started", 1, method=method, model=f"builtin/tiny{hostile}", max_steps=100, epochs=2, keep_every=1)
    prompt = f"What is 3 March 2021 in ISO form?{hostile}"
    writer.write("sample", 1, step=0, index=0, prompt=prompt, completion="2031-30-03")
    for step in range(1, steps + 1):
        writer.write("metrics", 1 + step * 0.2, step=step, epoch=step / 50, **metrics(method, step, 100))
        writer.write("batch", 1 + step * 0.2, step=step, offset=4 * (step - 1), count=4)
        if step % 20 == 0:
            writer.write(
                "sample", 1 + step * 0.2, step=step, index=0, prompt=prompt, completion=f"2021-03-{step // 20:02}"
            )
            place = {"path": f"checkpoints/checkpoint-{step}", "bytes": 40 << 20, "seconds": 1.2}
            writer.write("checkpoint", 1 + step * 0.2, step=step, state="committed", **place)
    card = {"index": 0, "load": 97, "memory_used": 20 << 30, "memory_total": 79 << 30, "power": 640, "temperature": 61}
    writer.write("gpu", 1 + steps * 0.2, devices=[card])


def text_of(app: Any) -> str:
    """Everything on screen."""
    return "\n".join("".join(part.text for part in line) for line in app.screen._compositor.render_strips(app.size))


@pytest.fixture
def shown() -> Callable[[Any], str]:
    """The text on an app's screen."""
    return text_of


@pytest.fixture
def writer() -> Callable[[RunFolder], Writer]:
    """More events for a run made here."""

    def more(run: RunFolder) -> Writer:
        found = Writer(run)
        found.seq = run.events.read_text("utf-8").count("\n") - 1
        return found

    return more


@pytest.fixture
def hostile() -> str:
    """Text that would take over a terminal or a markup parser."""
    return HOSTILE
