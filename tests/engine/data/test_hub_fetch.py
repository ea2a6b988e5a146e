"""What is fetched of a data set of the hub before its rows are read: the files that hold them, told before, and no more."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from engine.data import hub_fetch
from engine.data.cache_entries import cache_folder, entries, remove
from engine.data.hub_fetch import FETCHING, hub_rows
from engine.errors import Cancelled, DataError
from tests.data_hub import DataHub
from tests.engine.data.test_hub_sets import hub, packed, texts, unreachable  # noqa: F401 - a fixture

SPLITS = {"train": 3, "test": 2, "extra": 1}


@pytest.fixture
def card(hub: DataHub) -> DataHub:  # noqa: F811
    """Two subsets; of one three splits of 20 rows a file."""
    files = {
        f"{split}-{number}.parquet": packed(texts(20 * count, split)[20 * number :][:20], "parquet")
        for split, count in SPLITS.items()
        for number in range(count)
    }
    configs = "".join(f"  - split: {split}\n    path: {split}-*.parquet\n" for split in SPLITS)
    about = (
        "dataset_info:\n- config_name: main\n  features:\n  - {name: text, dtype: large_string}\n  - {name: pad, dtype: string}\n"
        "  splits:\n" + "".join(f"  - {{name: {each}, num_bytes: 1, num_examples: {20 * count}}}\n" for each, count in SPLITS.items())
        + "  download_size: 900000000000000\n  dataset_size: 900000000000000\n"
    )  # fmt: skip
    readme = f"---\n{about}configs:\n- config_name: main\n  data_files:\n{configs}- config_name: lines\n  data_files: a.parquet\n---\n"
    hub.put("me/rows", {"README.md": readme.encode(), "a.parquet": packed(texts(9, "line"), "parquet"), **files})
    lines = {f"train-{number}.jsonl": packed(texts(9, "line")[5 * number :][:5], "jsonl") for number in range(2)}
    hub.put("me/lines", lines)
    return hub


def fetched(hub: DataHub) -> set[str]:  # noqa: F811
    """Files that came whole."""
    return {
        path.rpartition("/")[2]
        for method, path, part in hub.asked
        if method == "GET" and "/resolve/" in path and not part
    }


@pytest.mark.parametrize(
    ("wanted", "files", "words"),
    [
        ({"split": "test"}, {"test-0.parquet", "test-1.parquet"}, [("test", number) for number in range(40)]),
        ({"split": "train", "limit": 25}, {"train-0.parquet", "train-1.parquet"}, [("train", number) for number in range(40)]),
        ({"split": "extra+test[30:]"}, {"extra-0.parquet", "test-0.parquet", "test-1.parquet"},
         [*(("extra", number) for number in range(20)), *(("test", number) for number in range(30, 40))]),
        ({"subset": "lines", "split": "train", "limit": 3}, {"a.parquet"}, [("line", number) for number in range(9)]),
        ({"name": "me/lines", "subset": None, "split": "train", "limit": 3}, {"train-0.jsonl", "train-1.jsonl"}, [("line", number) for number in range(9)]),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_fetched_alone_and_how_much_is_said_before(
    card: DataHub, wanted: dict[str, Any], files: set[str], words: list[tuple[str, int]]
) -> None:
    told: list[tuple[str, int, int]] = []
    before: list[set[str]] = []

    def progress(what: str, done: int, total: int) -> None:
        told.append((what, done, total))
        before.append(fetched(card))

    wanted = {"name": "me/rows", "subset": "main", **wanted}
    rows = hub_rows(on_progress=progress, **wanted)
    assert [tuple(row["text"].split()[:2]) for row in rows] == [(word, str(number)) for word, number in words]
    assert fetched(card) - {"README.md"} == files
    total = sum(len(card.sets[wanted["name"]][0][name]) for name in files)
    assert told[0] == (FETCHING, 0, total)
    assert not before[0] - {"README.md"}
    assert max(done for what, done, _ in told if what == FETCHING) == total
    if wanted["subset"] == "main":
        assert str(rows._dataset.features["text"].dtype) == "large_string"  # as the card says
    card.asked.clear()
    again = hub_rows(**wanted)
    assert (len(again), fetched(card)) == (len(words), set())
    assert again._dataset._fingerprint == rows._dataset._fingerprint  # what was prepared of them is found again
    (entry,) = entries(cache_folder(None))
    assert (entry.kind, entry.in_use) == ("copy", True)
    assert not remove(entry)
    assert str(entry.about["sources"][0]).startswith(f"{wanted['name']} (")
    del rows, again
    assert remove(entry)


def test_who_gives_up_while_it_is_fetched_leaves_nothing_half_made(card: DataHub) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if card.asked and fetched(card) - {"README.md"}:
            raise Cancelled("Given up.")

    with pytest.raises(Cancelled, match=r"Given up\."):
        hub_rows("me/rows", "train", "main", on_progress=stop)
    assert entries(cache_folder(None)) == []
    assert not [each for each in cache_folder(None).iterdir() if each.is_dir()]
    assert len(hub_rows("me/rows", "train", "main")) == 60


def test_without_the_hub_what_was_fetched_is_there_and_nothing_else(
    card: DataHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hub_rows("me/rows", "test", "main", revision=card.put("me/rows", card.sets["me/rows"][0]))
    hub_rows("me/rows", "test", "main", revision=card.put("me/rows", card.sets["me/rows"][0]))
    unreachable(monkeypatch)
    assert len(first) == 40
    assert len(hub_rows("me/rows", "test", "main")) == 40
    assert len(hub_rows("me/rows", "test", "main", limit=5)) == 40
    for other in ({"split": "train", "subset": "main"}, {"split": "test", "subset": "lines"}):
        with pytest.raises(DataError, match="me/rows: "):
            hub_rows("me/rows", **other)


def test_what_the_libraries_cache_holds_whole_is_taken_from_there(card: DataHub) -> None:
    datasets.load_dataset("me/rows", "lines")
    card.asked.clear()
    assert len(hub_rows("me/rows", "train", "lines")) == 9
    assert entries(cache_folder(None)) == []


def test_a_split_that_is_not_there_and_a_disk_that_is_too_small_are_told_before_anything_is_fetched(
    card: DataHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="me/rows: holds the splits train, test, extra; there is no dev"):
        hub_rows("me/rows", "dev[:3]", "main")
    monkeypatch.setattr(hub_fetch, "KEEP_FREE", 1 << 60)
    with pytest.raises(DataError, match=r"me/rows: the [\d,]+ bytes of its files do not fit onto the disk of"):
        hub_rows("me/rows", "test", "main")
    assert fetched(card) <= {"README.md"}
