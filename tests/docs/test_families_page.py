"""The page about families: its ticks are what a walk of each one gives, kept in a file beside it.

`python -m tests.docs.test_families_page [FAMILY ...]` walks all of them, or those, and writes both anew. With `--beside FILE
[--processes N]` it writes neither, but what the installed transformers gives into that file, and says where that is something
else than the page has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest
import transformers

from tests.caches import own_cache
from tests.engine.data import test_torchvision
from tests.families.models import FAMILIES
from tests.families.walk import STATIONS, YES, walk

DOCS = Path(__file__).parents[2] / "docs"
PAGE, KEPT = DOCS / "families.md", DOCS / "families.json"
BEGIN, END = "<!-- families -->\n", "<!-- end -->"
SOME = ("deepseek_v3", "idefics3")
"""Walked by default: adapters on layers that PEFT takes for experts, a model that sees."""
BY_TORCHVISION = ("pixtral", "mistral3", "lfm2_vl", "gemma4_vl")
"""Read by torchvision alone, which lies in a folder of its own: walked by a process that finds it there."""
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
    if name in BY_TORCHVISION and not _finds_torchvision():
        pytest.skip("torchvision is not installed")
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    assert _walk(name, tmp_path, tokenizer) == walks[name]


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


def walked(name: str) -> dict[str, str]:
    """A walk of this family, in a cache of its own."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as room:
        os.environ["WORKBENCH_CACHE"] = own_cache(Path(room) / "cache")
        return _walk(name, Path(room), Path(os.environ["WORKBENCH_TEST_DATA"]) / "tokenizers/minimind")


def _finds_torchvision() -> bool:
    return find_spec("torchvision") is not None or (test_torchvision.FOLDER / "torchvision").is_dir()


def _walk(name: str, room: Path, tokenizer: Path) -> dict[str, str]:
    if name not in BY_TORCHVISION or find_spec("torchvision") is not None or not _finds_torchvision():
        return walk(name, room / name, tokenizer)
    asked = (name, str(room / name), str(tokenizer))
    (found,) = test_torchvision.said_by("tests.families.walk", *asked, cache=room / "cache")
    return dict(found)


def record(names: list[str]) -> None:
    """Walks these families and writes file and page."""
    walks = {name: dict(said) for name, said in kept()[0].items()} if KEPT.exists() else {}
    for name in names:
        walks[name] = walked(name)
        print(name, {station: said for station, said in walks[name].items() if said != YES}, flush=True)
        _write({each: walks[each] for each in FAMILIES if each in walks})


def beside(names: list[str], into: Path, processes: int) -> bool:
    """Walks these families in so many processes and writes what each station said into a file; whether that is what the page
    has, which is said family by family."""
    page, version = kept()
    print(f"transformers {transformers.__version__} beside the page's {version}: {len(names)} families", flush=True)
    walks: dict[str, dict[str, str]] = {}
    with ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        begun = {pool.submit(walked, name): name for name in names}
        for done in as_completed(begun):
            name = begun[done]
            walks[name] = (
                dict.fromkeys(STATIONS, f"fails: {problem}") if (problem := done.exception()) else done.result()
            )
            into.write_text(json.dumps({"transformers": transformers.__version__, "families": walks}, indent=1) + "\n")
            for line in differences(walks[name], page[name]) or ["as on the page"]:
                print(f"{name}: {line}", flush=True)
    alike = sum(said == page[name] for name, said in walks.items())
    print(f"{alike} of {len(walks)} families as on the page", flush=True)
    return alike == len(names)


def differences(said: Mapping[str, str], page: Mapping[str, str]) -> list[str]:
    """A line for each station that says something else than the page."""
    return [
        f"{station}: {said[station]} (the page: {page[station]})"
        for station in STATIONS
        if said[station] != page[station]
    ]


def _write(walks: Walks) -> None:
    told = {"transformers": transformers.__version__, "families": walks}
    KEPT.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    if walks.keys() == FAMILIES.keys():
        PAGE.write_text(written(walks, transformers.__version__))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--beside", type=Path, metavar="FILE")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    given = parser.parse_args()
    if given.beside is None:
        record(given.families or list(FAMILIES))
    elif not beside(given.families or list(FAMILIES), given.beside, given.processes):
        sys.exit(1)
