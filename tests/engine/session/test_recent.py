"""The files opened last: each once, the newest first, and no more of them than there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.session import recent
from engine.session.recent import Recent, with_sources


def names(found: list[tuple[Path, float]]) -> list[str]:
    return [path.name for path, _ in found]


def test_a_file_opened_again_stands_first_and_once_and_the_oldest_fall_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).touch()
    known = Recent(tmp_path / "state")
    for name in "abca":
        known.note(tmp_path / name)
    assert names(known.configs()) == ["a", "c", "b"]
    (tmp_path / "c").unlink()
    assert names(known.configs()) == ["a", "b"]
    monkeypatch.setattr(recent, "MOST", 2)
    known.note(tmp_path / "b")
    (tmp_path / "c").touch()
    assert names(known.configs()) == ["b", "a"]


def test_a_file_that_runs_were_started_from_counts_by_the_newest_of_its_times(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).touch()
    opened = [(tmp_path / "a", 5.0), (tmp_path / "b", 4.0)]
    sources = [(str(tmp_path / "b"), 6.0), (str(tmp_path / "a"), 1.0), ("", 9.0), (str(tmp_path / "gone"), 8.0)]
    assert with_sources(opened, sources) == [(tmp_path / "b", 6.0), (tmp_path / "a", 5.0)]


def test_what_is_no_list_is_none(tmp_path: Path) -> None:
    for text in ("", "[]", '{"configs": [[1, 2]]}', '{"configs": [["a"]]}', '{"configs": 3}'):
        (tmp_path / "recent.json").write_text(text)
        assert Recent(tmp_path).configs() == []
