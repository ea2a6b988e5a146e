"""What is fetched of a data set of the hub before its rows are read: the files that hold them, told before, and no more."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest

from engine.data import hub_fetch
from engine.data.cache_entries import cache_folder, entries, remove
from engine.data.hub_fetch import FETCHING, hub_rows
from engine.errors import Cancelled, DataError
from engine.hub import COMMITS
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
    first = hub_rows("me/rows", "test", "main")
    card.put("me/rows", card.sets["me/rows"][0])
    COMMITS.known.clear()
    hub_rows("me/rows", "test", "main")
    COMMITS.known.clear()
    unreachable(monkeypatch)
    assert len(first) == 40
    assert len(hub_rows("me/rows", "test", "main")) == 40
    assert len(hub_rows("me/rows", "test", "main", limit=5)) == 40
    named = {"split": "test", "subset": "main", "revision": "v1"}  # which commit that is nobody knows
    for other in ({"split": "train", "subset": "main"}, {"split": "test", "subset": "lines"}, named):
        with pytest.raises(DataError, match="me/rows: "):
            hub_rows("me/rows", **other)


def test_a_share_of_a_split_is_one_of_all_its_rows_also_where_its_first_ones_are_here(card: DataHub) -> None:
    assert len(hub_rows("me/rows", "train", "main", limit=5)) == 20
    assert len(hub_rows("me/rows", "train[50%:]", "main", limit=5)) == 30


def test_all_splits_come_in_the_order_that_the_card_has(card: DataHub) -> None:
    words = [row["text"].split()[0] for row in hub_rows("me/rows", "all", "main")]
    assert list(dict.fromkeys(words)) == list(SPLITS)


def test_what_another_process_removed_since_it_was_found_is_made_again(
    card: DataHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_rows("me/rows", "test", "main")
    found = hub_fetch.entry_of

    def removed(about: dict[str, Any]) -> Any:
        place = found(about)
        assert all(map(remove, entries(cache_folder(None))))
        return place

    monkeypatch.setattr(hub_fetch, "entry_of", removed)
    assert len(hub_rows("me/rows", "test", "main")) == 40


def test_parquet_files_without_rows_are_passed_over_and_nothing_but_such_is_told(card: DataHub) -> None:
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts(1)).slice(0, 0), written)
    nothing = written.getvalue()
    card.put("me/rows", {**card.sets["me/rows"][0], "train-0.parquet": nothing, "extra-0.parquet": nothing})
    assert [len(hub_rows("me/rows", split, "main")) for split in ("train", "all")] == [40, 80]
    with pytest.raises(DataError, match="me/rows: the data set holds no rows"):
        hub_rows("me/rows", "extra", "main")


def test_what_the_libraries_cache_holds_whole_is_taken_from_there(
    card: DataHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets.load_dataset("me/rows", "lines")
    card.asked.clear()
    assert len(hub_rows("me/rows", "train", "lines")) == 9
    assert entries(cache_folder(None)) == []
    COMMITS.known.clear()
    unreachable(monkeypatch)
    assert len(hub_rows("me/rows", "train", "lines")) == 9
    with pytest.raises(DataError, match="me/rows: is wanted at revision v1, and without the hub nobody knows"):
        hub_rows("me/rows", "train", "lines", revision="v1")


def test_a_split_that_is_not_there_and_a_disk_that_is_too_small_are_told_before_anything_is_fetched(
    card: DataHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="me/rows: holds the splits train, test, extra; there is no dev"):
        hub_rows("me/rows", "dev[:3]", "main")
    monkeypatch.setattr(hub_fetch, "KEEP_FREE", 1 << 60)
    with pytest.raises(DataError, match=r"me/rows: the [\d,]+ bytes of its files do not fit onto the disk of"):
        hub_rows("me/rows", "test", "main")
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"me/rows: cannot be kept in .*file/prepared \(Not a directory\)"):
        hub_rows("me/rows", "test", "main")
    assert fetched(card) <= {"README.md"}
