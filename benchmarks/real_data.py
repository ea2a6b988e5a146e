"""The main job on real rows: eleven kinds of run, three seeds each, a frozen control, and one run killed and taken up again.

    WORKBENCH_TEST_DATA=FOLDER python benchmarks/real_data.py [--only WORDS] [--runs FOLDER] [--check]
                                                              [--results FILE --commit HASH]

Supervised fine-tuning with all weights and with LoRA on the questions of gsm8k and on Alpaca's rows, going on with
pretraining of a small story teller on Shakespeare, and preferences between right and wrong solutions, each through the
product's own supervisor and worker. LoRA starts from the story teller, DPO from a model that another job has trained,
in this call or in an earlier one with the same `--runs`. A job has learned where the worst of its seeds lies a tenth
under the frozen control on rows that were never trained on, and further under it than its seeds lie apart. The killed
run must give the losses and weights of the unbroken one, bit for bit (on a CPU).

DPO on solutions alone is measured on the pairs that it learns from: right and wrong ones differ by their arithmetic and
by nothing else (a bag of words trained on four fifths of the pairs is right on 52 to 55 % of the rest), which a model of
half a million weights cannot check. On pairs held out its loss is measured together with the likelihood of the chosen
solutions (`rpo_alpha`), which is what falls there. What DPO teaches of a task that such a model can do is measured on
right and wrong dates, on days that no pair held.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _device import processor
from _figures import Results, result_options

from engine.builtin import dates
from engine.config.files import overrides
from engine.data.gather_facts import gather_facts
from engine.rules import read
from engine.run import checkpoint, launch
from engine.run.from_config import launch_config
from engine.run.store import ENDED, RunFolder

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
SEEDS = (1, 2, 3)
FROZEN = 1e-30
"""A learning rate that moves no weight of float32: the control runs through the very same code."""
MUST_FALL = 0.10


@dataclass(frozen=True)
class Job:
    """One kind of run. `start` is a model, or the name of the job whose first seed it goes on from."""

    name: str
    start: str
    rows: str
    steps: int
    rate: float
    settings: dict[str, Any] = field(default_factory=dict)
    batch: int = 4


# The story teller knows 64 positions: the end of a row, which holds its answer, is kept.
SHORT = {"model.chat_template": "chatml", "data.max_length": 64, "data.truncation_side": "left"}
LORA = {"adapter.kind": "lora", "adapter.r": 16, "adapter.lora_alpha": 32}
FULL = {"adapter.kind": "none"}
JOBS = (
    Job("pretrain full shakespeare", "tinystories", "shakespeare", 80, 2e-3, FULL, batch=16),
    Job("pretrain lora shakespeare", "tinystories", "shakespeare", 80, 1e-2, LORA, batch=16),
    Job("sft full gsm8k", "builtin/tiny", "gsm8k", 50, 5e-3, FULL),
    Job("sft lora gsm8k", "tinystories", "gsm8k", 50, 1e-2, LORA | SHORT),
    Job("sft lora alpaca", "tinystories", "alpaca", 50, 1e-2, LORA | SHORT),
    Job("dpo lora gsm8k", "sft full gsm8k", "pairs", 24, 1e-2, LORA),
    Job("dpo lora gsm8k, with likelihood", "tinystories", "held-out pairs", 60, 1e-2, LORA | SHORT, batch=8),
    Job("sft full alpaca", "builtin/tiny", "alpaca", 30, 5e-3, FULL),
    Job("dpo full gsm8k", "sft full gsm8k", "pairs", 24, 1e-3, FULL),
    Job("sft full dates", "builtin/tiny", "dates", 200, 4e-3, FULL | {"model.tokenizer": None}, batch=64),
    Job("dpo lora dates", "sft full dates", "date pairs", 60, 1e-3, LORA, batch=16),
)


class Rows:
    """The files of the jobs: as they are where a held-out part is published, else split into two files of our own."""

    def __init__(self, data: Path, scratch: Path) -> None:
        self._data, self._scratch = data, scratch

    def settings(self, name: str) -> dict[str, Any]:
        """What the data section, and the method where the rows decide it, must say."""
        chat = {"data.max_length": 256, "data.excess_length": "truncate"}
        if name == "gsm8k":
            train, held_out = self._data / "gsm8k/train_1000.jsonl", self._data / "gsm8k/test_200.jsonl"
        elif name == "alpaca":
            train, held_out = self._split(self._json_lines("llama-factory/alpaca_en_demo.json"), name, 64)
        elif name == "dates":
            return {
                "data.train": [{"path": "builtin/dates"}],
                "data.eval": [{"path": "builtin/dates", "split": "eval", "rows": 400}],
                "data.max_length": 128,
            }
        elif name == "date pairs":
            train, held_out = self._date_pairs("train", 2000), self._date_pairs("eval", 400)
            chat = {"method.kind": "dpo", "data.max_length": 128}
        elif name == "pairs":
            lines = (self._data / "gsm8k/preference_pairs.jsonl").read_text("utf-8").splitlines(keepends=True)
            train = held_out = self._scratch / "pairs.jsonl"
            train.write_text("".join(lines[:32]), "utf-8")
            chat |= {"method.kind": "dpo", "data.max_length": 160}
        elif name == "held-out pairs":
            lines = (self._data / "gsm8k/preference_pairs.jsonl").read_text("utf-8").splitlines(keepends=True)
            train, held_out = self._split(lines, name, 48)
            chat |= {"method.kind": "dpo", "method.beta": 0.01, "method.rpo_alpha": 1.0}
        else:
            lines = (self._data / "tinyshakespeare/input_first_900k.txt").read_text("utf-8").splitlines(keepends=True)
            train, held_out = self._split(lines, name, 1000)
            chat = {"method.kind": "pretrain", "data.max_length": 64, "data.excess_length": "split"}
        return {**chat, "data.train": [{"path": str(train)}], "data.eval": [{"path": str(held_out), "rows": 48}]}

    def _date_pairs(self, split: dates.Split, count: int) -> Path:
        """A right answer beside that of another day."""
        place, draw = self._scratch / f"date-pairs-{split}.jsonl", random.Random(split)
        rows = [row["messages"] for row in dates.rows(split, count=count)]
        with place.open("w", encoding="utf-8") as out:
            for question, right in rows:
                wrong = right
                while wrong["content"] == right["content"]:
                    _, wrong = draw.choice(rows)
                out.write(json.dumps({"prompt": [question], "chosen": [right], "rejected": [wrong]}) + "\n")
        return place

    def _json_lines(self, name: str) -> list[str]:
        rows = json.loads((self._data / name).read_text("utf-8"))
        return [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]

    def _split(self, lines: list[str], name: str, held_out: int) -> tuple[Path, Path]:
        suffix = "txt" if name == "shakespeare" else "jsonl"
        train, last = (self._scratch / f"{name}-{part}.{suffix}" for part in ("train", "held-out"))
        train.write_text("".join(lines[:-held_out]), "utf-8")
        last.write_text("".join(lines[-held_out:]), "utf-8")
        return train, last


@dataclass
class Outcome:
    """What a job's runs left: the last held-out loss of the control and of each seed, and what was not as it must be."""

    job: Job
    frozen: float
    learned: list[float]
    wrong: list[str]

    @property
    def fell(self) -> float:
        """By how much the worst seed lies under the control, as a share."""
        return 1 - max(self.learned) / self.frozen

    @property
    def spread(self) -> float:
        return max(self.learned) - min(self.learned)

    def judged(self) -> Outcome:
        if self.fell < MUST_FALL:
            self.wrong.append(f"the {self._where} loss fell by {self.fell:.1%} only")
        if self.frozen - max(self.learned) <= self.spread:
            self.wrong.append("the seeds lie further apart than the control from them")
        return self

    @property
    def _where(self) -> str:
        return "trained pairs'" if self.job.rows == "pairs" else "held-out"

    def sentence(self) -> str:
        learned = ", ".join(f"{loss:.4f}" for loss in self.learned)
        return (
            f"{self.job.name}: {self._where} loss {self.frozen:.4f} frozen, {learned} after {self.job.steps} steps "
            f"(worst seed {self.fell:.1%} lower, seeds {self.spread:.4f} apart)"
            + "".join(f"\n    WRONG: {what}" for what in self.wrong)
        )


class Bench:
    """Runs the jobs in one runs folder, in order."""

    def __init__(self, data: Path, runs: Path, scratch: Path) -> None:
        self._data, self._runs = data, runs
        self._rows = Rows(data, scratch)

    def outcome(self, job: Job) -> Outcome:
        """All runs of one job."""
        still = [f"optim.learning_rate={FROZEN}", "optim.max_steps=2", "run.eval_steps=2", "run.save_steps=1"]
        frozen = self._ended(self._start(job, SEEDS[0], *still))
        runs = [self._ended(self._start(job, seed)) for seed in SEEDS]
        wrong = [complaint for run in runs for complaint in _not_whole(run, job.steps)]
        broken = self._killed_and_resumed(self._start(job, SEEDS[0]))
        wrong += _differences(runs[0], broken)
        return Outcome(job, _held_out(frozen), [_held_out(run) for run in runs], wrong).judged()

    def _start(self, job: Job, seed: int, *more: str) -> RunFolder:
        mapping: dict[str, Any] = {"version": 1}
        settings = {**self._model(job), **self._rows.settings(job.rows), **job.settings, "run.seed": seed}
        settings |= {
            "optim.learning_rate": job.rate,
            "optim.max_steps": job.steps,
            "optim.per_device_train_batch_size": job.batch,
            "optim.gradient_accumulation_steps": 1,
            "optim.warmup_steps": 0.1,
            "run.save_steps": job.steps // 2,
            "run.eval_steps": job.steps // 2,
            "run.name": _slug(job.name),
        }
        for path, value in settings.items():
            section, name = path.split(".")
            mapping.setdefault(section, {})[name] = value
        mapping = overrides(mapping, list(more))
        facts = gather_facts(read(mapping).config)
        reading = read(mapping, facts)
        if not reading.ok:
            raise SystemExit("\n".join(finding.message for finding in reading.findings))
        return launch_config(reading.config, facts, runs_dir=self._runs)

    def _model(self, job: Job) -> dict[str, Any]:
        if job.start == "builtin/tiny":
            given = {"model.name": job.start, "model.tokenizer": str(self._data / "tokenizers/minimind")}
        elif job.start == "tinystories":
            given = {"model.name": str(self._data / "weights/tinystories-llama-260k")}
        else:
            given = {"model.name": str(self._from(job.start))}
        return {**given, "model.dtype": "float32"}

    def _from(self, name: str) -> Path:
        """The last checkpoint of a seed of this job."""
        steps = next(job.steps for job in JOBS if job.name == name)
        for folder in sorted(self._runs.glob(f"{_slug(name)}-*")):
            newest, _ = checkpoint.newest_valid(RunFolder(folder))
            if newest is not None and checkpoint.step_of(newest) == steps and RunFolder(folder).state == "finished":
                return newest
        raise SystemExit(f"a job goes on from {name}, which was not run: name both in --only.")

    def _ended(self, run: RunFolder) -> RunFolder:
        _wait(lambda: run.state in ENDED, 3600)
        if run.state != "finished":
            raise SystemExit(f"{run.path}: {run.state}: {run.read_json().get('message')}")
        return run

    def _killed_and_resumed(self, run: RunFolder) -> RunFolder:
        _wait(lambda: any(event["state"] == "committed" for event in _events(run, "checkpoint")), 3600)
        worker = run.worker()
        assert worker is not None
        os.kill(worker.pid, signal.SIGKILL)
        _wait(lambda: run.state in ENDED, 60)
        if run.state != "failed":
            raise SystemExit(f"{run.path}: the run was over before it could be killed; give it more steps.")
        launch.resume(run)
        return self._ended(run)


def _slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def _wait(ready: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise SystemExit(f"nothing happened for {seconds:.0f} s")
        time.sleep(0.1)


def _events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    lines = run.events.read_text("utf-8").splitlines() if run.events.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["kind"] == kind]


def _curve(run: RunFolder, name: str) -> dict[int, float]:
    """The newest value of each step, so that a segment taken up again replaces what it left."""
    return {event["step"]: event[name] for event in _events(run, "metrics") if name in event}


def _held_out(run: RunFolder) -> float:
    return list(_curve(run, "eval_loss").values())[-1]


def _newest(run: RunFolder) -> Path:
    newest, skipped = checkpoint.newest_valid(run)
    assert newest is not None
    assert not skipped
    return newest


def _not_whole(run: RunFolder, steps: int) -> list[str]:
    wrong = []
    if list(_curve(run, "loss")) != list(range(1, steps + 1)):
        wrong.append(f"{run.id}: the curve has not every step")
    if checkpoint.step_of(_newest(run)) != steps or checkpoint.problem_with(_newest(run), hashes=True):
        wrong.append(f"{run.id}: the last checkpoint is not whole")
    return wrong


def _differences(whole: RunFolder, broken: RunFolder) -> list[str]:
    wrong = []
    resumed = _events(broken, "started")[-1]["resumed_from_step"]
    if not resumed:
        wrong.append(f"{broken.id}: began anew instead of going on")
    for name in ("loss", "grad_norm", "eval_loss"):
        if _curve(whole, name) != _curve(broken, name):
            wrong.append(f"{broken.id}: {name} differs from the unbroken run")
    sums = [json.loads((_newest(run) / "COMMIT.json").read_text())["files"] for run in (whole, broken)]
    weights = [{name: entry["sha256"] for name, entry in files.items() if ".safetensors" in name} for files in sums]
    if not weights[0] or weights[0] != weights[1]:
        wrong.append(f"{broken.id}: weights differ from the unbroken run")
    return wrong


def _record(results: Results, outcome: Outcome) -> None:
    """One row a job: losses, no times, so that it may be run beside other work."""
    learned = "/".join(f"{loss:.4f}" for loss in outcome.learned)
    shape = f"{outcome.job.name}; {outcome.job.steps} steps; measured loss {outcome.frozen:.4f} frozen {learned} seeds 1/2/3"
    results.add("real_data", shape)


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--only", nargs="+", default=[], metavar="WORDS", help="jobs whose name holds one of these")
    given.add_argument("--runs", type=Path)
    result_options(given)
    given.add_argument("--check", action="store_true", help="exit 1 unless every job is as it must be")
    options = given.parse_args()
    data = os.environ.get("WORKBENCH_TEST_DATA")
    if not data:
        raise SystemExit("WORKBENCH_TEST_DATA must name the folder of real rows.")
    bad = 0
    with tempfile.TemporaryDirectory(prefix="real-data-") as scratch:
        bench = Bench(Path(data), (options.runs or Path(scratch)).absolute(), Path(scratch))
        for job in JOBS:
            if options.only and not any(words in job.name for words in options.only):
                continue
            outcome = bench.outcome(job)
            print(outcome.sentence(), flush=True)
            bad += bool(outcome.wrong)
            _record(Results(options, processor(), "torch"), outcome)
    return int(options.check and bad > 0)


if __name__ == "__main__":
    sys.exit(main())
