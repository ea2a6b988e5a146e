"""A process without a home that may be written gets one, and says where."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import platformdirs
import pytest

from engine.errors import WorkbenchError
from workbench import home as place_of_home
from workbench.__main__ import _run
from workbench.home import provide_home


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that says where caches lie, and those that are set here go again."""
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN_PATH", "TRITON_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("home", ["/dev/null", "~", "/"])
def test_a_home_that_may_not_be_written_is_replaced_for_all_that_is_started(
    home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("WORKBENCH_CACHE", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = provide_home()
    place = tmp_path / f"workbench-{os.getuid()}"
    assert Path.home() == place
    assert place.stat().st_mode & 0o777 == 0o700
    assert words.endswith(f": caches go to {place}; set WORKBENCH_CACHE to keep them elsewhere.")
    assert provide_home() == ""


def test_it_lies_where_caches_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    assert provide_home() == f"/dev/null may not be written: caches go to {tmp_path}/cache/home-{os.getuid()}."


def test_a_home_of_ones_own_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert provide_home() == ""
    assert os.environ["HOME"] == str(tmp_path)


def test_without_any_folder_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("WORKBENCH_CACHE", "/dev/null/cache")
    with pytest.raises(
        WorkbenchError, match=r"/dev/null/cache: must be a folder that may be written; got Not a directory"
    ) as told:
        provide_home()
    assert "--tmpfs /tmp" in told.value.hint


def test_a_home_that_may_be_read_alone_stays_and_what_lies_in_it_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, cache = tmp_path / "home", tmp_path / "kept"
    (home / ".cache/huggingface/hub").mkdir(parents=True)
    (home / ".cache/huggingface/token").write_text("secret")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WORKBENCH_CACHE", str(cache))

    def access(path: str | os.PathLike[str], mode: int) -> bool:  # these tests may be root's, who may write all
        return os.access(path, mode) and not (mode & os.W_OK and Path(path).is_relative_to(home))

    monkeypatch.setattr(place_of_home, "os", SimpleNamespace(**{**vars(os), "access": access}))
    words = provide_home()
    place = cache / f"home-{os.getuid()}"
    assert words.startswith(f"{home}/.cache may not be written: caches go to {place}; models of the hub are read in")
    assert Path.home() == home
    assert Path(platformdirs.user_cache_dir("workbench")) == place / ".cache/workbench"
    assert Path(platformdirs.user_state_dir("workbench")) == place / ".local/state/workbench"
    assert os.environ["HF_HOME"] == f"{place}/.cache/huggingface"
    assert os.environ["HF_HUB_CACHE"] == f"{home}/.cache/huggingface/hub"
    assert os.environ["HF_TOKEN_PATH"] == f"{home}/.cache/huggingface/token"
    assert provide_home() == ""


@pytest.mark.parametrize("words", ["--version", "train --help", "explain lora"])
def test_what_keeps_nothing_needs_no_home(words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("WORKBENCH_CACHE", "/dev/null/cache")
    monkeypatch.setattr(sys, "argv", ["workbench", *words.split()])
    assert (_run(as_json=False), capsys.readouterr().err) == (0, "")
