"""A process without a home that may be written gets one, and says where."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from engine.errors import WorkbenchError
from workbench.home import provide_home


@pytest.mark.parametrize("home", ["/dev/null", "~"])
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
    assert provide_home() == f"/dev/null may not be written: caches go to {tmp_path}/cache/home."


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
