"""The process that samples beside the training: the training's own answers to the bit, adapters as files, and what becomes of one
that dies, hangs or lies. Most tests ask a small process in its place, which has no model and needs no seconds to start."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from engine.errors import WorkbenchError
from engine.run.control import request
from engine.run.disk import CAUSES, StorageError
from engine.run.spawn import ALL_CARDS, other_card
from engine.run.store import RunFolder
from engine.trainers import generating_process
from engine.trainers.watching import Watching
from tests.engine.trainers.conftest import CONVERSATIONS, heard_by, lines
from tests.engine.trainers.test_async_rollouts import AHEAD, asked
from tests.engine.trainers.test_grpo import curve, same_after_a_resume

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = """
import hashlib, json, os, pathlib, random, signal, sys, time

here, run = pathlib.Path(__file__).parent, pathlib.Path(sys.argv[1])
life = sum(1 for _ in here.glob("life-*"))
(here / f"life-{life}").write_text(str(os.getpid()))


def say(**answer):
    print(json.dumps(answer), flush=True)


faults = json.loads((here / "faults.json").read_text())
fault = faults[min(life, len(faults) - 1)]
if fault == "loads nothing":
    say(mark="ready", problem="ModelError: there is no such model.")
    sys.exit(1)
say(mark="ready", device="DEVICE")
for number, line in enumerate(sys.stdin):
    request = json.loads(line)
    if number == 2 and fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2 and fault == "hangs":
        time.sleep(3600)
    if number == 2 and fault == "lies":
        say(mark="another", ids=[], logps=[])
        continue
    adapter = request["adapter"]
    right = hashlib.sha256((run / adapter["file"]).read_bytes()).hexdigest() == adapter["sha256"]
    with open(here / "asked.jsonl", "a") as log:
        own = {"life": life, "step": adapter["step"], "right": right, "seed": request["seed"], "run": str(run)}
        own |= {"files": sorted(path.name for path in (run / "generation").iterdir())}
        log.write(json.dumps({**own, "threads": os.environ.get("OMP_NUM_THREADS")}) + chr(10))
    draw = random.Random(f"{request['seed']} {adapter['sha256']}")
    ids = [[draw.randrange(40, 120) for _ in range(draw.randrange(1, 9))] for _ in request["prompts"]]
    say(mark=request["mark"], ids=ids, logps=[[-draw.random() for _ in answer] for answer in ids])
""".replace("DEVICE", DEVICE)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Has a small process answer; `small("dies", "")` has its first life die at the third question, the second go well."""
    script = tmp_path / "small" / "small.py"
    script.parent.mkdir()
    script.write_text(SMALL)
    monkeypatch.setattr(generating_process, "COMMAND", (str(script),))

    def with_faults(*faults):
        (script.parent / "faults.json").write_text(json.dumps(faults or [""]))
        return script.parent

    with_faults()
    return with_faults


HELD_OUT = {
    "data.val_set_size": 8,
    "run.eval_steps": 2,
    "optim.per_device_eval_batch_size": 4,
    "optim.early_stopping_patience": 9,
}


def questions(folder: Path):
    return [json.loads(line) for line in (folder / "asked.jsonl").read_text().splitlines()]


def gone(folder: Path) -> bool:
    """Whether no process of any life is left."""
    found = [int(path.read_text()) for path in folder.glob("life-*")]
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in found)


def beside(source, **more):
    return {**AHEAD, "data.train": [{"path": source(CONVERSATIONS)}], "method.async_prefetch": "answers", **more}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"adapter.use_dora": True, **HELD_OUT}, id="DoRA, measured on held-out prompts"),
        pytest.param(
            {"model.dtype": "bfloat16"},
            id="on a card",
            marks=[pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")],
        ),
    ],
)
def test_the_process_answers_to_the_bit_what_the_training_would(train, source, capfd, more):
    """By the same adapters, which it has from files: answers, curves and weights of both runs are equal. It imports no package
    that the training does without: bitsandbytes says on a processor that it misses one."""
    settings = beside(source, **{"method.prefetch_depth": 2, **more})
    own = train({**settings, "method.async_prefetch": "rewards"})
    run = train(settings)
    assert asked(run) == asked(own)
    assert curve(run, "prefetch/age") == curve(own, "prefetch/age") == [0, 1, 2, 2, 2]
    for name in ("loss", "grad_norm", "reward", "eval_reward", "sampling/importance_sampling_ratio/mean"):
        assert curve(run, name) == curve(own, name), name
    assert bool(curve(run, "eval_reward")) is ("data.val_set_size" in more)
    name = "checkpoints/checkpoint-5/adapter_model.safetensors"
    assert (run.path / name).read_bytes() == (own.path / name).read_bytes()
    said = next(entry for entry in lines(run, "receipt")[0]["entries"] if entry["feature"] == "loss")["detail"]
    assert "answers are sampled by a process of its own, which is given the adapter each step, 2 ahead, and" in said
    assert not (run.path / "generation").exists()
    assert not lines(run, "finding")
    assert "kernels-community" not in capfd.readouterr().err
    assert not [
        each
        for each in psutil.Process().children(recursive=True)
        if "engine.trainers.generating" in " ".join(each.cmdline())
    ]


def test_the_adapter_is_sent_as_a_file_each_time_it_is_due(train, source, small):
    folder = small()
    run = train(beside(source, **{"method.weight_sync_steps": 2, "optim.max_steps": 6, "run.save_steps": 50}))
    told = questions(folder)
    assert [each["step"] for each in told] == [0, 0, 0, 2, 2, 4]
    assert all(each["right"] for each in told)
    assert len({each["seed"] for each in told}) == 6
    assert curve(run, "prefetch/age") == [0, 1, 2, 1, 2, 1]
    assert max(len(each["files"]) for each in told) <= 2
    assert not (run.path / "generation").exists()
    assert gone(folder)


def test_one_that_dies_is_replaced_and_answers_the_same(train, source, small):
    """The same weights as of a run in which none died: it is asked by the same adapter and the same seeds."""
    folder = small()
    whole = train(beside(source))
    folder = small("", "dies", "")
    run = train(beside(source))
    assert curve(run, "loss") == curve(whole, "loss")
    assert asked(run) == asked(whole)
    (finding,) = lines(run, "finding")
    assert finding["message"] == (
        "method.async_prefetch: the process that samples answers ended by itself (signal 9). It was started anew and is asked again."
    )
    assert gone(folder)


def test_one_that_hangs_is_replaced_and_asked_again(train, source, small):
    folder = small("hangs", "")
    run = train(beside(source, **{"method.generation_timeout": 1.0}))
    (finding,) = lines(run, "finding")
    assert "did not answer within 1 seconds" in finding["message"]
    assert [each["life"] for each in questions(folder)] == [0, 0, 1, 1, 1]
    assert gone(folder)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (("dies at once",), ""),
        (("lies",), "wrote something else than answers, for the second time in a row."),
        (
            ("loads nothing",),
            "method.async_prefetch: the process that samples answers: ModelError: there is no such model.",
        ),
    ],
)
def test_one_that_never_answers_ends_the_run_with_one_sentence(train, source, small, monkeypatch, faults, said):
    folder = small(*faults)
    if not said:
        monkeypatch.setattr(generating_process, "COMMAND", ("-c", "raise SystemExit(3)"))
        said = "method.async_prefetch: the process that samples answers ended by itself (exit code 3), for the second time in a row."
    elif faults == ("lies",):
        # Each life lies at its third question, and is asked the first ones again by nobody.
        script = folder / "small.py"
        script.write_text(SMALL.replace('number == 2 and fault == "lies"', 'fault == "lies"'))
    run = train(beside(source), code=1)
    (failed,) = lines(run, "failed")
    assert said in failed["message"]
    assert not failed["lines"]
    assert gone(folder)
    assert not (run.path / "generation").exists()


def test_resuming_equals_never_stopping(train, source, small, tmp_path):
    """A checkpoint holds what was under way: its answers are of weights that are gone by then."""
    folder = small()
    same_after_a_resume(train, beside(source, **{"method.prefetch_depth": 2, "method.weight_sync_steps": 2}), tmp_path)
    told = questions(folder)
    first, second = (
        [(each["seed"], each["step"]) for each in told if ("again" in each["run"]) is later] for later in (False, True)
    )
    assert [step for _, step in first] == [0, 0, 0, 0, 2, 2]
    assert second == first[5:]


def test_a_stop_in_the_middle_leaves_no_process_and_goes_on_as_if_there_had_been_none(
    train, source, small, tmp_path, monkeypatch
):
    folder = small()
    settings = beside(source, **{"run.save_steps": 50, "method.prefetch_depth": 2, "optim.max_steps": 6})
    whole = train(settings)
    asked_to, begins, hear = [], Watching.on_step_begin, heard_by(monkeypatch)

    def asked_in_the_third_step(self, args, state, *more, **kwargs):
        if state.global_step == 2 and not asked_to:
            asked_to.append(request(self.run, "save_stop", "a test"))
            hear()
        return begins(self, args, state, *more, **kwargs)

    monkeypatch.setattr(Watching, "on_step_begin", asked_in_the_third_step)
    run = train(settings)
    assert lines(run, "stopped")[0]["step"] == 3
    assert gone(folder)
    train(folder=RunFolder(run.path))
    assert curve(run, "loss") == curve(whole, "loss")


def test_it_ends_when_the_training_is_gone(tmp_path):
    """Also while it loads its model: it listens by a thread."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.trainers.generating", str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0
    assert process.stdout is not None
    assert process.stdout.read() == b""
    process.stdout.close()


class Alone:
    """A trainer without a training."""

    writer = None

    def __init__(self, place: Path) -> None:
        self.run = RunFolder(place)
        self.run.path.mkdir()
        self.accelerator = SimpleNamespace(device=SimpleNamespace(type=DEVICE))


def begun(tmp_path, seconds, prompts):
    """A source that was asked one thing, and what becomes of it."""
    source = generating_process.GeneratingProcess(Alone(tmp_path / "run"), seconds, 1)
    source.start()
    source._adapter = generating_process.Adapter("generation/none", "", 0)
    return source, source.begin(SimpleNamespace(prompts=prompts, seed=1))


def test_an_adapter_that_finds_no_room_is_said_as_that(tmp_path):
    """Not as an exception, after which a run is started anew. Here by a limit that the system sets to files."""
    source = generating_process.GeneratingProcess(Alone(tmp_path / "run"), 1.0, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"adapter-3\.safetensors: .*: 8\.0 KiB needed") as told:
            source._send(3, bytes(8 << 10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert told.value.cause in CAUSES.values()
    source.close()


def test_it_ends_while_it_is_asked(tmp_path, small):
    """Who closes waits neither for its answer nor for its time to be over."""
    folder = small("hangs")
    (folder / "small.py").write_text(SMALL.replace('number == 2 and fault == "hangs"', "True"))
    source, future = begun(tmp_path, 600.0, [[5, 6]])
    while not future.running():
        time.sleep(0.01)
    source.close()
    with pytest.raises(WorkbenchError):
        future.result(0)
    assert gone(folder)


def test_it_is_started_though_the_training_forks_in_that_moment(tmp_path, small, monkeypatch):
    """As the processes that read rows are: one held the pipe that tells of the start, and the run waited for it without an end."""
    small()
    begins, forked = threading.Event(), threading.Event()
    starts = subprocess._fork_exec  # type: ignore[attr-defined]

    def start_late(*args):
        begins.set()
        forked.wait(0.5)
        return starts(*args)

    monkeypatch.setattr(subprocess, "_fork_exec", start_late)
    source, future = begun(tmp_path, 60.0, [[5, 6]])
    begins.wait()
    if not (reader := os.fork()):
        time.sleep(30)
        os._exit(0)
    forked.set()
    try:
        with pytest.raises(WorkbenchError, match="exit code 1"):  # it ran, and lacks its adapter
            future.result(15)
    finally:
        os.kill(reader, signal.SIGKILL)
        os.waitpid(reader, 0)
        source.close()


def test_what_it_started_ends_with_it(tmp_path, small):
    folder = small("hangs")
    starts = (
        "import subprocess; other = subprocess.Popen(['sleep', '600']); (here / 'life-1').write_text(str(other.pid))"
    )
    (folder / "small.py").write_text(
        SMALL.replace("def say", f"{starts}\n\n\ndef say").replace('number == 2 and fault == "hangs"', "True")
    )
    source, future = begun(tmp_path, 600.0, [[5, 6]])
    while not future.running() or not (folder / "life-1").exists():
        time.sleep(0.01)
    source.close()
    end = time.monotonic() + 20
    while not gone(folder) and time.monotonic() < end:  # init waits for it
        time.sleep(0.05)
    assert gone(folder)


def test_one_that_does_not_even_read_is_replaced(tmp_path, small):
    """A question that fills its pipe waits no longer than for an answer."""
    folder = small()
    (folder / "small.py").write_text(
        SMALL.replace("for number, line in enumerate(sys.stdin):", "for number in [time.sleep(3600)]:")
    )
    source, future = begun(tmp_path, 0.5, [[5] * 100_000])
    with pytest.raises(WorkbenchError, match=r"did not answer within 0\.5 seconds, for the second time in a row"):
        future.result(60)
    source.close()
    assert gone(folder)


def test_it_works_on_the_gpu_of_that_number_where_the_run_was_launched():
    assert other_card(1, {}) == "1"
    assert other_card(1, {ALL_CARDS: ""}) == "1"
    assert other_card(1, {ALL_CARDS: "4,GPU-9b", "CUDA_VISIBLE_DEVICES": "4"}) == "GPU-9b"
    assert other_card(2, {ALL_CARDS: "4,GPU-9b"}) == ""
