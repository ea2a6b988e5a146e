"""Bytes over the comm of one notebook monitor that asks four times a second while a run goes: at most 20 KiB/s.

    python benchmarks/widget_traffic.py --seconds 600

It writes a live run with the metrics of a real one, asks as the browser does (what it holds goes along), and serialises
every message with Jupyter's own session: the question, the answer with its buffers, and the kernel's two status messages.
"payload" is content and buffers alone; "wire" is all of it, headers and signature too.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from _device import processor
from _figures import Results, result_options
from jupyter_client.session import Session

from engine.run import store
from engine.run.events import EventWriter
from widgets import Monitor

LIMIT = 20 * 1024
METHOD = (
    "mean_token_accuracy",
    "entropy",
    "rewards/margins",
    "rewards/accuracies",
    "rewards/chosen",
    "rewards/rejected",
)


class Counter:
    """Serialises what would go over the websocket, and adds it up."""

    def __init__(self) -> None:
        self.session = Session(key=b"benchmark")
        self.payload = self.wire = self.messages = self.largest = 0

    def add(self, kind: str, content: dict[str, Any], buffers: list[bytes] = [], parent: Any = None) -> Any:  # noqa: B006
        message = self.session.msg(kind, content, parent=parent)
        frames = self.session.serialize(message)
        size = sum(len(frame) for frame in frames) + sum(len(buffer) for buffer in buffers)
        if kind == "comm_msg":
            inner = len(json.dumps(content["data"]["content"])) + sum(len(buffer) for buffer in buffers)
            self.payload += inner
            self.largest = max(self.largest, inner)
        self.wire += size
        self.messages += 1
        return message

    def exchange(self, asked: dict[str, Any], monitor: Monitor) -> Any:
        question = self.add("comm_msg", _custom(asked))
        self.add("status", {"execution_state": "busy"}, parent=question)
        answer = monitor.answer(asked)
        self.add("comm_msg", _custom(answer.data), answer.buffers, parent=question)
        self.add("status", {"execution_state": "idle"}, parent=question)
        return answer


def _custom(content: dict[str, Any]) -> dict[str, Any]:
    return {"comm_id": "0" * 32, "data": {"method": "custom", "content": content}}


class View:
    """Holds what the browser would hold, so that it asks for what the browser would ask for."""

    def __init__(self, run: str) -> None:
        self.run, self.seq, self.epoch = run, -1, 0
        self.marks: dict[str, int] = {}
        self.names: list[str] = []
        self.ends: dict[str, float | None] = {}

    def question(self, number: int) -> dict[str, Any]:
        held = {"seq": self.seq, "epoch": self.epoch, "marks": self.marks, "series": self.ends, "page": "curves"}
        return {"id": f"abcdef.{number}", "do": "watch", "run": self.run, **held}

    def take(self, answer: Any) -> None:
        data, buffers = answer.data, list(answer.buffers)
        assert data["ok"], data
        self.marks |= data.get("marks", {})
        if "names" in data.get("parts", {}):
            self.names = [entry["name"] for entry in data["parts"]["names"]]
        self.seq = data.get("seq", self.seq)
        if data.get("latest"):
            buffers.pop(0)
        self.ends = {name: self.ends.get(name) for name in self.names}
        for (number, count), buffer in zip(data.get("series", []), buffers, strict=True):
            self.ends[self.names[number]] = array("d", buffer[: 8 * count])[-1]


def step(pen: EventWriter, number: int, draw: random.Random) -> None:
    numbers = {
        "loss": 2 * math.exp(-number / 800) + 0.1 * draw.random(),
        "grad_norm": draw.random(),
        "learning_rate": 1e-4,
    }
    numbers |= {
        "tokens": number * 4096,
        "trained_tokens": number * 2048,
        "tokens_per_second": 9000 + 100 * draw.random(),
    }
    numbers |= {
        "step_seconds": 0.05 + 0.01 * draw.random(),
        "data_seconds": 0.001,
        "memory_allocated": 2.1e10,
        "mfu": 0.3,
    }
    numbers |= {"memory_reserved": 2.4e10, "memory_peak": 2.3e10}
    pen.write("metrics", step=number, epoch=number / 1e4, **numbers, **{name: draw.random() for name in METHOD})
    if number % 100 == 0:
        card = {"load": 97, "memory_used": 2.4e10, "memory_total": 8e10, "power": 640.0, "temperature": 61}
        pen.write("gpu", devices=[{"index": index, **card} for index in range(8)])
        pen.write("sample", step=number, index=0, prompt="What is 3 March 2021 in ISO form?", completion="2021-03-03")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--hz", type=float, default=4)
    parser.add_argument("--steps-per-second", type=float, default=5)
    result_options(parser)
    options = parser.parse_args()
    counter, draw = Counter(), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        info = {"name": "traffic", "method": "dpo", "model": "Qwen/Qwen3-0.6B", "host": "another-machine"}
        run = store.create(Path(folder), "version: 1\n", info)
        run.update_json(state="running")
        pen = EventWriter(run)
        pen.write("started", method="dpo", model="Qwen/Qwen3-0.6B", max_steps=100_000, epochs=1, resumed_from_step=None)
        pen.write("phase", name="Training")
        monitor, view = Monitor(run), View(run.id)
        begun, number, asked, cpu = time.monotonic(), 0, 0, time.process_time()
        while (elapsed := time.monotonic() - begun) < options.seconds:
            while number < elapsed * options.steps_per_second:
                number += 1
                step(pen, number, draw)
            asked += 1
            view.take(counter.exchange(view.question(asked), monitor))
            time.sleep(max(0.0, asked / options.hz - (time.monotonic() - begun)))
        seconds = time.monotonic() - begun
        monitor.close()
        cpu = time.process_time() - cpu
    opening = len(str(Monitor._esm)) + len(str(Monitor._css))
    result = {
        "seconds": round(seconds, 1),
        "questions_per_second": round(asked / seconds, 2),
        "steps": number,
        "curves": len(view.names),
        "payload_kib_per_second": round((counter.payload + opening) / seconds / 1024, 2),
        "wire_kib_per_second": round((counter.wire + opening) / seconds / 1024, 2),
        "largest_answer_bytes": counter.largest,
        "opening_bytes": opening,
        "cpu_share": round(cpu / seconds, 3),
        "limit_kib_per_second": LIMIT / 1024,
    }
    print(json.dumps(result, indent=1))
    shape = f"{seconds:.0f} s, {options.hz:g} Hz, {result['wire_kib_per_second']} KiB/s on the wire"
    Results(options, processor()).add("widget_traffic", shape)
    raise SystemExit(0 if (counter.wire + opening) / seconds <= LIMIT else 1)


if __name__ == "__main__":
    main()
