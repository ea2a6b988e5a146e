"""`workbench queue`: a run is given the place that was asked for, counted from 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.run.store import create
from tests import warm


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four runs of another machine, which nothing here looks after, that wait."""
    for number, name in enumerate("abcd"):
        run = create(tmp_path, "version: 1\n", {"name": name, "host": "another-machine", "method": "sft"})
        run.update_json(state="queued", created=float(number), message="waits for a free device")
    return tmp_path


def order(root: Path, *words: str) -> str:
    done = warm.here("queue", *words, "--runs", str(root), "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert [entry["place"] for entry in listed] == [1, 2, 3, 4]
    return "".join(entry["id"][0] for entry in listed)


def test_a_run_comes_where_it_is_put(root: Path) -> None:
    assert order(root) == "abcd"
    assert order(root, "a-0001", "--place", "3") == "bcad"
    assert order(root, "d-0001", "--first") == "dbca"
    assert order(root, "b-0001", "--last") == "dcab"
    assert order(root, "a-0001", "--place", "1") == "adcb"
    assert order(root, "a-0001", "--place", "9") == "dcba"


def test_two_places_at_once_are_refused_and_move_nothing(root: Path) -> None:
    refused = warm.here("queue", "d-0001", "--first", "--last", "--runs", str(root))
    assert (refused.returncode, "exclude each other" in refused.stderr) == (2, True)
    assert order(root) == "abcd"
