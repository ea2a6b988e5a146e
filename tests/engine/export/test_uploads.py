"""Checkpoints that are sent to a hub beside a training: a real client, a server that fails in every way, no function replaced."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config.facts import Facts
from engine.config.files import as_yaml, parse
from engine.errors import WorkbenchError
from engine.export import uploads
from engine.export.hub_folder import hub_folder
from engine.rules import read
from engine.run import checkpoint
from engine.run.async_writer import AsyncWriter
from engine.run.store import RunFolder, create
from engine.run.view import RunView, fold
from tests.hub_server import CUT, HANG, TOKEN, WHO, Hub, serving

ADAPTER = {"base_model_name_or_path": "/home/somebody/models/base", "peft_type": "LORA", "r": 8}
FILES = {
    "adapter_model.safetensors": b"adapter" * 1000,
    "adapter_config.json": json.dumps(ADAPTER).encode(),
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "optimizer.pt": b"moments" * 1000,
    "scheduler.pt": b"rate",
    "rng_state.pth": b"random",
    "trainer_state.json": b"{}",
}
MODEL = ["README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as server:
        for name, value in server.environment(tmp_path / "home", patience=1).items():
            monkeypatch.setenv(name, value)
        yield server


def run_of(tmp_path: Path, base: str = "someone/base", **settings: Any) -> RunFolder:
    mapping = {
        "version": 1,
        "model": {"name": base},
        "adapter": {"kind": "lora"},
        "data": {"train": [{"path": "builtin/dates"}]},
        "run": {"push_to_hub": True, "hub_model_id": WHO, **settings},
    }
    run = create(tmp_path / "runs", as_yaml(mapping), {"method": "sft", "model": "someone/base"})
    for folder in (run.checkpoints, run.control):
        folder.mkdir(exist_ok=True)
    return run


def saved(run: RunFolder, step: int, mark: bytes = b"") -> int:
    """A complete checkpoint of that step."""
    tmp = checkpoint.begin(run, step)
    for name, content in FILES.items():
        (tmp / name).write_bytes(content + mark + b"%d" % step if name.endswith((".safetensors", ".pt")) else content)
    checkpoint.commit(tmp, {"config_hash": ""})
    return step


class Training:
    """What the worker does around its uploads."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.writer = run, AsyncWriter(run)
        config = read(parse(run.read_config(), path=run.config).mapping, Facts()).config
        self.uploads = uploads.Uploads(run, config, self.writer)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *problem: object) -> None:
        self.uploads.__exit__(*problem)
        self.writer.close()

    def until(self, state: str, step: int | None = None) -> dict[str, Any]:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for entry in self.view.uploads:
                if entry["state"] == state and step in (None, entry["step"]):
                    return entry
            time.sleep(0.02)
        raise AssertionError((state, self.view.uploads, self.view.findings))

    @property
    def view(self) -> RunView:
        lines = self.run.events.read_text().splitlines() if self.run.events.exists() else []
        return fold(RunView(), [json.loads(line) for line in lines])

    def end(self, step: int, *, hurried: bool = False, look: Any = lambda done, total: "") -> None:
        self.uploads.finish(step, look, hurried=hurried)


def test_a_model_arrives_complete_private_and_without_what_was_not_asked_for(hub: Hub, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with Training(run) as training:
        (row,) = training.uploads.ready()
        assert row["detail"].startswith(f"to {WHO}, private: adapter, tokenizer and model card of each checkpoint")
        training.uploads.committed(saved(run, 2))
        training.until("arrived", 2)
        training.end(saved(run, 4))
    assert hub.private is True
    assert hub.commits[0] == MODEL
    assert sorted(hub.files) == MODEL
    assert hub.files["adapter_model.safetensors"].endswith(b"4")
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "someone/base"
    assert b"sent while the run trained" in hub.files["README.md"]
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert [(entry["step"], entry["state"]) for entry in training.view.uploads] == [(2, "arrived"), (4, "arrived")]
    assert training.view.uploads[1]["url"].endswith(f"/commit/{2:040x}")
    assert not (run.path / "hub").exists()
    kept = [path for path in run.path.rglob("*") if path.is_file()]
    assert not [path for path in kept if TOKEN.encode() in path.read_bytes()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept if path.name == "hub.json"} == {0o600}


def test_a_base_of_this_machine_is_named_without_where_it_lies(hub: Hub, tmp_path: Path) -> None:
    run = run_of(tmp_path, base=str(tmp_path / "client" / "their-base"))
    with Training(run) as training:
        training.uploads.ready()
        training.end(saved(run, 2))
    assert training.view.uploads[-1]["state"] == "arrived", training.view.findings
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "their-base"
    assert b"their-base" in hub.files["README.md"]
    assert not [name for name, content in hub.files.items() if b"client" in content]


def test_a_checkpoint_can_be_gone_on_with_from_the_hub_and_is_not_sent_twice(hub: Hub, tmp_path: Path) -> None:
    run = run_of(tmp_path, hub_strategy="checkpoint")
    with Training(run) as training:
        training.uploads.ready()
        training.end(saved(run, 4))
    inner = {name.removeprefix("last-checkpoint/"): content for name, content in hub.files.items() if "/" in name}
    there = tmp_path / "other" / "checkpoints" / "checkpoint-4"
    there.mkdir(parents=True)
    for name, content in inner.items():
        (there / name).write_bytes(content)
    assert checkpoint.problem_with(there, hashes=True) == ""
    with Training(run) as training:  # it goes on, and has nothing new
        training.uploads.ready()
        training.uploads.committed(4)
        training.end(4)
    assert len(hub.commits) == 1
    with Training(run) as training:  # it went back, and made another one of this step
        training.uploads.ready()
        training.end(saved(run, 4, b"anew"))
    assert len(hub.commits) == 2


def test_all_checkpoints_have_folders_of_their_own_and_one_that_was_deleted_is_said(hub: Hub, tmp_path: Path) -> None:
    run = run_of(tmp_path, hub_strategy="all_checkpoints", hub_private_repo=False)
    hub.fails = [("/commit/", HANG, 1)]
    with Training(run) as training:
        training.uploads.ready()
        training.uploads.committed(saved(run, 2))
        training.until("begun", 2)
        checkpoint.discard(run.checkpoints / "checkpoint-2")  # what is on its way stays whole
        for step in (4, 6):
            training.uploads.committed(saved(run, step))
        checkpoint.discard(run.checkpoints / "checkpoint-4")
        hub.released.set()
        training.end(6)
    assert hub.private is False
    folders = {name.partition("/")[0] for name in hub.files if "/" in name}
    assert "checkpoint-6" in folders
    assert "checkpoint-4" not in folders
    assert any("checkpoint-4 was not sent: run.save_total_limit" in each["message"] for each in training.view.findings)


def test_of_all_checkpoints_those_that_are_missing_are_said_and_sent_as_the_run_goes_on(
    hub: Hub, tmp_path: Path
) -> None:
    run = run_of(tmp_path, hub_strategy="all_checkpoints")
    hub.fails = [("/commit/", HANG, 99)]
    with Training(run) as training:
        training.uploads.ready()
        for step in (2, 4, 6):
            training.uploads.committed(saved(run, step))
        training.until("begun", 2)
        training.uploads.leave()
    said = training.view.findings[-1]["message"]
    assert said.startswith(f"checkpoint-6 had not arrived at {WHO}")
    assert said.endswith(" Nor had checkpoint-2, checkpoint-4, which going on with the run sends while they are kept.")
    hub.fails = []
    hub.released.set()
    checkpoint.discard(run.checkpoints / "checkpoint-2")
    with Training(run) as training:
        training.uploads.ready()
        training.uploads.gone_on(6)
        training.end(6)
    assert {name.partition("/")[0] for name in hub.files if "/" in name} == {"checkpoint-4", "checkpoint-6"}
    assert hub.files["adapter_model.safetensors"].endswith(b"6")
    assert len(hub.commits) == 2
    (run.path / "hub.json").write_text(
        json.dumps({k: v for k, v in json.loads((run.path / "hub.json").read_text()).items() if k.endswith("6")})
    )
    with Training(run) as training:  # the model of the newest stays the one that is there
        training.uploads.ready()
        training.uploads.gone_on(6)
        training.end(6)
    assert len(hub.commits) == 2


@pytest.mark.parametrize(
    ("path", "fault", "said"),
    [
        ("/commit/", 500, "the hub answers with error 500"),
        ("/commit/", 429, "the hub answers with error 429"),
        ("/commit/", HANG, "127.0.0.1 did not answer within 1 s"),
        ("/store/", CUT, "127.0.0.1 could not be reached, or cut the connection"),
    ],
)
def test_what_fails_is_said_and_tried_again(hub: Hub, tmp_path: Path, path: str, fault: int | str, said: str) -> None:
    run = run_of(tmp_path)
    hub.fails = [(path, fault, 2)]
    with Training(run) as training:
        training.uploads.ready()
        training.uploads.committed(saved(run, 2))
        training.until("arrived", 2)
        training.end(2)
    (finding,) = training.view.findings
    assert finding["message"].startswith(f"checkpoint-2 has not arrived at {WHO}: {said}"), finding
    assert sorted(hub.files) == MODEL, "all of it, in one commit"
    assert len(hub.commits) == 1
    assert TOKEN not in run.events.read_text()


def test_orders_wait_for_nothing_while_the_hub_hangs_and_the_newest_is_sent(hub: Hub, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    hub.fails = [("/commit/", HANG, 1)]
    with Training(run) as training:
        training.uploads.ready()
        training.uploads.committed(saved(run, 2))
        training.until("begun", 2)
        steps = [saved(run, step) for step in (4, 6, 8)]
        begun = time.perf_counter()
        for step in steps:
            training.uploads.committed(step)
        assert time.perf_counter() - begun < 0.1, "it hangs for a second and more"
        training.until("arrived", 8)
        states = {entry["step"]: entry["state"] for entry in training.view.uploads}
    assert states == {2: "passed", 4: "passed", 6: "passed", 8: "arrived"}
    assert len(hub.commits) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_without_the_right_is_told_before_the_first_step(hub: Hub, tmp_path: Path, status: int) -> None:
    hub.private = True
    hub.fails = [("/auth-check/write", status, 9)]
    with Training(run_of(tmp_path)) as training, pytest.raises(WorkbenchError) as told:
        training.uploads.ready()
    assert "the hub refuses me/model" in told.value.message
    assert "HF_TOKEN" in told.value.hint
    assert TOKEN not in told.value.full_message
    assert hub.commits == []


def test_nothing_is_sent_where_everybody_reads_unless_that_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    hub.private = False
    with Training(run_of(tmp_path)) as training, pytest.raises(WorkbenchError, match="everybody can read it: me/model"):
        training.uploads.ready()
    hub.fails = [("/api/", HANG, 1)]  # as above, but the hub answers only once the training is on its way
    run = run_of(tmp_path)
    with Training(run) as training:
        training.uploads.ready()
        training.end(saved(run, 2))
    assert hub.commits == []
    assert any("everybody can read it" in each["message"] for each in training.view.findings)


def test_a_right_that_is_lost_costs_a_sentence(hub: Hub, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    hub.fails = [("/commit/", 403, 1)]
    with Training(run) as training:
        training.uploads.ready()
        training.uploads.committed(saved(run, 2))
        training.until("failed", 2)
        training.end(saved(run, 4))
    assert [entry["state"] for entry in training.view.uploads] == ["failed", "arrived"]


@pytest.mark.parametrize(
    ("seconds", "troubled", "hurried", "said"),
    [
        (2, 99.0, False, "it took longer than 2 s"),
        (99, 99.0, True, "it took longer than 1 s"),
        (99, 2.0, False, "127.0.0.1 did not answer within 1 s"),
    ],
)
def test_the_end_waits_a_bounded_time_and_says_what_is_missing(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: int,
    troubled: float,
    hurried: bool,
    said: str,
) -> None:
    monkeypatch.setattr(uploads, "TROUBLED", troubled)
    run = run_of(tmp_path, hub_wait_seconds=seconds, grace_seconds=1)
    hub.fails = [("/commit/", HANG, 99)]
    with Training(run) as training:
        training.uploads.ready()
        begun = time.monotonic()
        training.end(saved(run, 2), hurried=hurried)
        assert time.monotonic() - begun < 30
        training.writer.write("finished", step=2)
        hub.released.set()
        time.sleep(0.3)  # nothing is told after the last word
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert events[-1]["kind"] == "finished"
    last = training.view.findings[-1]["message"]
    assert f"checkpoint-2 had not arrived at {WHO} when the run ended: {said}" in last
    assert f"--checkpoint 2 --form adapter --to {WHO}` sends it" in last


def test_a_person_ends_the_wait(hub: Hub, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    hub.fails = [("/commit/", HANG, 99)]
    seen: list[tuple[int, int]] = []

    def look(done: int, total: int) -> str:
        seen.append((done, total))
        return "somebody asked to wait no longer" if done else ""

    with Training(run) as training:
        training.uploads.ready()
        training.end(saved(run, 2), look=look)
    assert seen[-1][0] > 0
    assert seen[-1][1] > len(FILES["adapter_model.safetensors"])
    assert "somebody asked to wait no longer" in training.view.findings[-1]["message"]
    assert not (run.path / "hub").exists()


def test_it_leaves_though_a_forked_process_holds_its_input(hub: Hub, tmp_path: Path) -> None:
    """As the processes do that read images for the training."""
    run = run_of(tmp_path)
    hub.fails = [("/commit/", HANG, 99)]
    with Training(run) as training:
        training.uploads.ready()
        held = os.dup(training.uploads._orders)
        training.uploads.committed(saved(run, 2))
        training.until("begun", 2)
        begun = time.monotonic()
    os.close(held)
    assert time.monotonic() - begun < 4, "it is not killed after five seconds"
    assert training.uploads._process.returncode == 0
    assert not (run.path / "hub").exists()


def test_a_process_that_is_killed_ends_no_run(hub: Hub, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    hub.fails = [("/commit/", HANG, 99)]
    with Training(run) as training:
        training.uploads.ready()
        training.uploads.committed(saved(run, 1))
        training.until("begun", 1)
        os.kill(training.uploads._process.pid, 9)
        training.uploads._process.wait()
        training.uploads.committed(saved(run, 2))
        training.end(2)
    said = [each["message"] for each in training.view.findings]
    assert "the process that sends has ended" in said[0]
    assert "checkpoint-2 had not arrived" in said[-1]
    assert not (run.path / "hub").exists()


def test_what_arrived_is_told_though_it_cannot_be_noted(hub: Hub, tmp_path: Path) -> None:
    """As on a disk that is full by then."""
    run = run_of(tmp_path)
    (run.path / "hub.json").mkdir()
    with Training(run) as training:
        training.uploads.ready()
        training.end(saved(run, 2))
    assert training.view.uploads[-1]["state"] == "arrived"
    assert not training.view.findings
    assert "adapter_model.safetensors" in hub.files


def test_files_are_copied_where_they_can_have_no_second_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    saved(run, 2)
    config = read(parse(run.read_config(), path=run.config).mapping, Facts()).config

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    for copied in (False, True):
        if copied:
            monkeypatch.setattr(os, "link", refuse)
        with hub_folder(run, config, 2, "checkpoint") as folder:
            held = {path.name: path for path in folder.path.rglob("*.safetensors")}
            assert held["adapter_model.safetensors"].read_bytes() == FILES["adapter_model.safetensors"] + b"2"
            assert (held["adapter_model.safetensors"].stat().st_nlink > 1) is not copied
        assert not (run.path / "hub").exists()
    assert checkpoint.problem_with(run.checkpoints / "checkpoint-2", hashes=True) == ""
