"""The page about families: its ticks are what a walk of each one gives, kept in a file beside it.

`python -m tests.docs.test_families_page [FAMILY ...]` walks all of them, or those, and writes both anew.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import transformers

from tests.caches import own_cache
from tests.families.models import FAMILIES
from tests.families.walk import STATIONS, YES, walk

DOCS = Path(__file__).parents[2] / "docs"
PAGE, KEPT = DOCS / "families.md", DOCS / "families.json"
BEGIN, END = "<!-- families -->\n", "<!-- end -->"
SOME = ("deepseek_v3", "idefics3")
"""Walked by default: adapters on layers that PEFT takes for experts, a model that sees."""
HEADS = {
    "check": "check", "estimate": "estimate", "preview": "preview", "lora": "LoRA", "full": "all weights", "qlora": "QLoRA",
    "resume": "resume", "adapter": "PEFT opens it", "merged": "merged", "whole": "exported", "gguf": "GGUF", "chat": "chat",
}  # fmt: skip
Walks = Mapping[str, Mapping[str, str]]


def table(walks: Walks) -> str:
    """The table, and below it what stands for each number in it."""
    notes: dict[str, int] = {}

    def cell(said: str) -> str:
        if said == YES:
            return YES
        number = notes.setdefault(said.removeprefix(YES).strip(" ()"), len(notes) + 1)
        return f"{YES if said.startswith(YES) else said.partition(':')[0].partition(' ')[0]} ({number})"

    lines = ["| family | in the record | " + " | ".join(HEADS[each] for each in STATIONS) + " |"]
    lines.append("| --- " * (len(STATIONS) + 2) + "|")
    for name, family in FAMILIES.items():
        said = walks[name]
        lines.append(f"| {family.title} | {name} | " + " | ".join(cell(said[each]) for each in STATIONS) + " |")
    told = [f"{number}. {_plain(text)}" for text, number in notes.items()]
    return "\n".join([*lines, "", *told]) + "\n"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def written(walks: Walks, version: str) -> str:
    """The page with this table."""
    before, _, after = PAGE.read_text().partition(BEGIN)
    whole = sum(
        all(said[each].startswith((YES, "none")) for each in STATIONS if each != "gguf") for said in walks.values()
    )
    head = f"transformers {version}, on a CPU: {len(walks)} families, {whole} of them through every station that they have, GGUF aside.\n\n"
    return before + BEGIN + head + table(walks) + END + after.partition(END)[2]


def kept() -> tuple[Walks, str]:
    """What was recorded, and with which transformers."""
    told = json.loads(KEPT.read_text())
    return told["families"], told["transformers"]


def test_page_and_record_say_the_same_of_every_family() -> None:
    walks, version = kept()
    assert walks.keys() == FAMILIES.keys()
    assert PAGE.read_text() == written(walks, version)
    assert not [name for name, said in walks.items() if any(each.startswith("fails") for each in said.values())]


def _holds(name: str, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walks, version = kept()
    if version != transformers.__version__:
        pytest.skip(f"the page is of transformers {version}")
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    assert walk(name, tmp_path / name, tokenizer) == walks[name]


@pytest.mark.parametrize("name", SOME)
def test_a_family_passes_the_stations_that_the_page_says(
    name: str, tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _holds(name, tmp_path, shared_data / "tokenizers/minimind", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - set(SOME)))
def test_every_family_passes_the_stations_that_the_page_says(
    name: str, tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _holds(name, tmp_path, shared_data / "tokenizers/minimind", monkeypatch)


def record(names: list[str]) -> None:
    """Walks these families and writes file and page."""
    transformers.utils.logging.disable_progress_bar()
    data = Path(os.environ["WORKBENCH_TEST_DATA"])
    walks = {name: dict(said) for name, said in kept()[0].items()} if KEPT.exists() else {}
    for name in names:
        with tempfile.TemporaryDirectory() as room:
            os.environ["WORKBENCH_CACHE"] = own_cache(Path(room) / "cache")
            walks[name] = walk(name, Path(room) / name, data / "tokenizers/minimind")
        print(name, {station: said for station, said in walks[name].items() if said != YES}, flush=True)
        _write({each: walks[each] for each in FAMILIES if each in walks})


def _write(walks: Walks) -> None:
    told = {"transformers": transformers.__version__, "families": walks}
    KEPT.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    if walks.keys() == FAMILIES.keys():
        PAGE.write_text(written(walks, transformers.__version__))


if __name__ == "__main__":
    record(sys.argv[1:] or list(FAMILIES))
