"""Renders the README's picture of the notebook from the real widgets in a real JupyterLab: part of `make pictures`.

    python docs/pictures_notebook.py [FILE.png] [--dark] [--width PIXELS] [--runs DIR]

It trains the built-in demo in a process of its own and photographs two cells while that goes on: the form on one of its
steps, and the monitor of the run. It ends the run afterwards; one that is named by `--runs` it lets go on.
Needs chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.run.store import ENDED, find

DOCS = Path(__file__).parent
RUN = "dates-0001"
CELLS = [
    "from widgets import Monitor, Workbench\n\nWorkbench(height=410)",
    f'Monitor("{RUN}", height=472)',
]
PHOTOGRAPHED_AT = 260
# The widgets as wide as asked for, and nothing of the notebook that belongs to whoever works in it.
STYLE = ".ftw { width: %dpx; } .jp-Collapser, .jp-cell-toolbar { visibility: hidden; }"
COUNTED = "() => document.querySelector('.ftw-consequences').innerText.includes('tokens per epoch')"
SHOWN = (
    """() => Number(document.querySelectorAll('.ftw-share')[0]?.textContent.match(/step ([\\d,]+)/)?.[1] ?? 0) > %d"""
)


def browsing() -> ModuleType:
    """The JupyterLab and Chromium of the browser tests."""
    place = DOCS.parent / "tests" / "browser" / "lab.py"
    spec = importlib.util.spec_from_file_location("lab", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lab"] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def training(folder: Path) -> Iterator[Path]:
    """The folder of runs in which the demo is being trained; what still goes on afterwards is stopped."""
    runs = folder / "runs"
    command = [sys.executable, "-m", "workbench"]
    subprocess.run([*command, "demo", "--detach", "--runs", str(runs)], check=True)
    try:
        yield runs
    finally:
        if find(RUN, runs).state not in ENDED:
            subprocess.run([*command, "stop", RUN, "--now", "--runs", str(runs)], check=True)


def picture(target: Path, runs: Path, *, dark: bool = False, width: int = 900) -> None:
    """Two cells with their widgets, each `width` wide. Raises RuntimeError where this machine cannot make it."""
    tools = browsing()
    if tools.missing():
        raise RuntimeError(tools.missing())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tools.write_notebook(root / "workbench.ipynb", CELLS)
        with (
            tools.serve(root, WORKBENCH_RUNS=str(runs)) as lab,
            tools.browser() as chromium,
            tools.opened(chromium, lab, "workbench.ipynb", width=width + 320, height=1400) as page,
        ):
            page.theme("JupyterLab Dark" if dark else "JupyterLab Light")
            page.command("application:toggle-left-area")
            page.run_all()
            page.sees(".ftw-goal")
            page.tab.click("[data-tab=method]")
            page.tab.add_style_tag(content=STYLE % width)
            page.shows(SHOWN % PHOTOGRAPHED_AT, f"step {PHOTOGRAPHED_AT}", seconds=900)
            page.shows(COUNTED, "the tokens are counted", seconds=120)
            photograph(page.tab, width, target)


def photograph(tab: Any, width: int, target: Path) -> None:
    """From the top of the first cell to the end of the second one's widget."""
    tab.mouse.move(5, 5)
    tab.evaluate("() => document.activeElement?.blur()")
    tab.wait_for_timeout(700)
    first = tab.locator(".jp-Notebook .jp-Cell").first.bounding_box()
    last = tab.locator(".ftw").last.bounding_box()
    edge = last["x"] + width + 14
    clip = {
        "x": first["x"],
        "y": first["y"],
        "width": edge - first["x"],
        "height": last["y"] + last["height"] + 12 - first["y"],
    }
    tab.screenshot(path=str(target), clip=clip)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", type=Path, default=DOCS / "widget.png")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=900)
    parser.add_argument("--runs", type=Path, help="a folder in which the demo is being trained already")
    options = parser.parse_args()
    with contextlib.ExitStack() as held:
        runs = options.runs or held.enter_context(training(Path(held.enter_context(tempfile.TemporaryDirectory()))))
        picture(options.target, runs, dark=options.dark, width=options.width)


if __name__ == "__main__":
    main()
