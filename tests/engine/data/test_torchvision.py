"""With torchvision families read images by it: a step each, beside what Pillow makes, in one process that has it.

torchvision lies in a folder of its own (`make test` installs it there), so that all other tests run without it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from engine.run.store import RunFolder
from tests.caches import own_cache
from tests.engine.seeing import FAMILIES

HERE = Path(__file__).parents[3]
FOLDER = Path(sys.prefix) / "torchvision"
ONLY = ("pixtral", "mistral3", "lfm2_vl")
"""Families that torchvision alone reads."""
BOTH = ("idefics3", "qwen2_5_vl")
"""Of those that Pillow reads too, one that cuts images to a size and one that keeps their shape."""
# The wheel is of torch with CUDA; beside a torch without it, the operators that it registers shapes for are not there.
CODE = (
    "import runpy, sys, types\n"
    "sys.modules['torchvision._meta_registrations'] = types.ModuleType('torchvision._meta_registrations')\n"
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)\n"
)


def said_by(module: str, *arguments: str, cache: Path) -> list[Any]:
    """The lines of JSON that a module of tests prints, run where torchvision is found."""
    environment = {
        **os.environ, "PYTHONPATH": f"{FOLDER}{os.pathsep}{HERE}", "WORKBENCH_CACHE": own_cache(cache),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE, module, *arguments],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["five", "ten"])
def found(
    shared_data: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, list[dict[str, Any]]]:
    if not (FOLDER / "torchvision").is_dir():
        pytest.skip(f"torchvision is not in {FOLDER}, where make test installs it")
    folder = tmp_path_factory.mktemp("torchvision")
    tokenizer = str(shared_data / "tokenizers/minimind")
    names = [*(FAMILIES if request.param else BOTH), *ONLY]
    return folder, said_by("tests.engine.data.with_torchvision", str(folder), tokenizer, *names, cache=folder / "cache")


def test_all_other_tests_run_without_it() -> None:
    """But those with the oldest versions, which need it for more."""
    assert find_spec("torchvision") is None or "oldest" in sys.prefix


def test_families_train_a_step_and_see_what_pillow_sees(found: tuple[Path, list[dict[str, Any]]]) -> None:
    families = {row["family"]: row for row in found[1] if "family" in row}
    assert set(families) >= {*BOTH, *ONLY}
    for name, row in families.items():
        assert row["losses"][1] < row["losses"][0] - 0.01, name
        if name in ONLY:
            continue
        assert row["tokens_equal"], name
        # A level of 255 is 0.008 to 0.015 once it is normalized; at the edges of noise a resize is some levels apart.
        # transformers before 5.18 resizes those two less alike.
        older = name in ("idefics3", "smolvlm") and Version(version("transformers")) < Version("5.18")
        assert row["apart"] < (0.03 if older else 0.01), name
        for by_torchvision, by_pillow in zip(row["losses"], row["losses_pil"], strict=True):
            assert by_torchvision == pytest.approx(by_pillow, abs=1e-3 if older else 2e-4), name
        assert row["own_cache"], name


def test_a_run_says_what_read_its_images_and_does_not_go_on_without_it(
    found: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.worker import main

    folder, rows = found
    assert rows[-1]["code"] == 0
    run = RunFolder(folder / "runs" / rows[-1]["run"])
    receipt = next(event for event in _events(run) if event["kind"] == "receipt")
    (line,) = (each for each in receipt["entries"] if each["feature"] == "images")
    (installed,) = FOLDER.glob("torchvision-*.dist-info")
    assert (
        line["effective"]
        == f"torchvision {installed.name.split('-')[1].removesuffix('.dist')}, pillow {version('pillow')}"
    )
    if find_spec("torchvision") is not None:
        return
    monkeypatch.setenv("WORKBENCH_CACHE", str(folder / "cache"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        assert main(str(run.path)) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "torchvision is asked for, which is not installed" in _events(run)[-1]["message"]


def _events(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.events.read_text().splitlines()]
