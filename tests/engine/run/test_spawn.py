"""A worker's environment holds the secrets alone that its run needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.compat import import_scans
from engine.config.facts import Facts, SourceFacts
from engine.data.cache_entries import cache_folder
from engine.errors import WorkbenchError
from engine.facts import compiler_waits, step_times
from engine.kernels import tuned
from engine.rules import read
from engine.run import rehearsed
from engine.run.devices import Choice
from engine.run.from_config import secrets_of
from engine.run.inside import READ_WITHIN
from engine.run.spawn import HUB_TOKENS, NO_HUB_TOKEN, environment

BASE = {
    "PATH": "/bin",
    "HF_TOKEN": "hf",
    "WANDB_API_KEY": "w",
    "AWS_SECRET_ACCESS_KEY": "a",
    "GITHUB_TOKEN": "g",
    "SSH_AUTH_SOCK": "/s",
    "JUDGE_KEY": "j",
    "INDEX": "https://me:geheim@host",
    "TOKENIZERS_PARALLELISM": "true",
    "HTTPS_PROXY": "http://me:geheim@proxy",
    "TRITON_CACHE_DIR": "/t",
    "TORCHINDUCTOR_CACHE_DIR": "/i",
}


def secret(values: dict[str, str]) -> set[str]:
    return values.keys() & (
        BASE.keys() - {"PATH", "TOKENIZERS_PARALLELISM", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
    )


def test_a_run_from_the_hub_has_its_token_and_one_from_here_has_none() -> None:
    with_hub = environment(BASE, Choice((), 1), "run", HUB_TOKENS)
    assert secret(with_hub) == {"HF_TOKEN", "HTTPS_PROXY"}
    without = environment(BASE, Choice((), 1), "run", ())
    assert secret(without) == set()
    assert without[NO_HUB_TOKEN] == "1"
    assert without["WORKBENCH_RUN_TOKEN"] == "run"
    assert without["TOKENIZERS_PARALLELISM"] == "true"


def test_what_bounds_an_assistants_looks_bounds_no_run() -> None:
    assert READ_WITHIN not in environment({READ_WITHIN: "[]"}, Choice((), 1), "t")


def test_a_judges_key_is_handed_on_by_its_name() -> None:
    named = {**BASE, "WORKBENCH_REWARD_SECRETS": "JUDGE_KEY, OTHER"}
    assert secret(environment(named, Choice((), 1), "run", ())) == {"JUDGE_KEY"}


@pytest.mark.parametrize("named", [True, False])
def test_all_that_is_kept_lies_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, own = tmp_path / "finetuning-workbench", ""
    monkeypatch.delenv("WORKBENCH_CACHE", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if named:  # it may be shared, and nobody runs code that another user compiled
        folder, own = tmp_path / "named", f"-{os.getuid()}"
        monkeypatch.setenv("WORKBENCH_CACHE", str(folder))
    values = environment(os.environ, Choice((), 1), "run", ())
    assert values["TRITON_CACHE_DIR"] == f"{folder}/triton{own}"
    assert values["TORCHINDUCTOR_CACHE_DIR"] == f"{folder}/inductor{own}"
    assert (folder / f"triton{own}").stat().st_mode & 0o777 == 0o700
    assert compiler_waits.place() == compiler_waits.place(values) == folder / f"inductor{own}" / compiler_waits.FILE
    places = (rehearsed.kept(), step_times.own(), cache_folder(None), import_scans.place(), tuned.folder())
    assert {place.parent for place in places} == {folder}


def test_a_folder_for_compiled_kernels_that_cannot_be_made_is_told_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WorkbenchError, match=r"WORKBENCH_CACHE: compiled kernels cannot be kept in .*/file/triton-"):
        environment({"WORKBENCH_CACHE": str(tmp_path / "file")}, Choice((), 1), "run", ())


def test_the_hubs_token_is_needed_while_something_is_not_here() -> None:
    here = {"model": {"name": "builtin/tiny"}, "data": {"train": [{"path": "builtin/dates"}]}}
    assert secrets_of(read(here).config, Facts()) == []
    assert secrets_of(read({**here, "model": {"name": "some/model-of-the-hub"}}).config, Facts()) == list(HUB_TOKENS)
    rows = {**here, "data": {"train": [{"path": "some/rows-of-the-hub"}]}}
    assert secrets_of(read(rows).config, Facts()) == list(HUB_TOKENS)
    local = Facts(sources={"some/rows-of-the-hub": SourceFacts("some/rows-of-the-hub", exists=True)})
    assert secrets_of(read(rows).config, local) == []


def test_the_keys_of_a_store_are_there_while_rows_come_from_it() -> None:
    rows = {"model": {"name": "builtin/tiny"}, "data": {"train": [{"path": "s3://bucket/rows.jsonl"}]}}
    names = secrets_of(read(rows).config, Facts())
    assert secret(environment(BASE, Choice((), 1), "run", names)) == {"AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY"}
    rows["data"] = {"train": [{"path": "gs://bucket/rows.jsonl"}]}
    assert "AWS_SECRET_ACCESS_KEY" not in secrets_of(read(rows).config, Facts())


def test_a_workers_log_holds_no_secret_even_where_it_dies_before_it_can_say_anything(tmp_path: Path) -> None:
    token = "hf_" + "a" * 34
    folder = tmp_path / token / "run"
    (folder / "run.lock").mkdir(parents=True)
    (folder / "config.yaml").write_text("version: 1\n")
    argv = [sys.executable, "-P", "-m", "engine.worker", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert token not in done.stderr + done.stdout
