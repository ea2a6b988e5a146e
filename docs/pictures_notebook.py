"""Renders the README's picture of the notebook from the real widget in a real JupyterLab: part of `make pictures`.

    python docs/pictures_notebook.py [FILE.png] [--dark] [--show preview|method|monitor|...]

It trains the built-in demo for a few hundred steps from the widget itself and photographs the cell. Needs chromium.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).parent
CELL = "from widgets import Workbench\n\nWorkbench()"


def _browsing() -> ModuleType:
    """The JupyterLab and Chromium of the browser tests."""
    place = DOCS.parent / "tests" / "browser" / "lab.py"
    spec = importlib.util.spec_from_file_location("lab", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lab"] = module
    spec.loader.exec_module(module)
    return module


def picture(target: Path, *, dark: bool = False, show: str = "monitor", cell: str = CELL) -> None:
    """One picture of the workbench's cell. Raises RuntimeError where this machine cannot make it."""
    browsing = _browsing()
    if browsing.missing():
        raise RuntimeError(browsing.missing())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        browsing.write_notebook(root / "workbench.ipynb", [cell])
        with (
            browsing.serve(root, WORKBENCH_RUNS=str(root / "runs")) as lab,
            browsing.browser() as chromium,
            browsing.opened(chromium, lab, "workbench.ipynb", width=1200, height=900) as page,
        ):
            if dark:
                page.theme("JupyterLab Dark")
            page.tab.evaluate("() => { window.jupyterapp.commands.execute('application:toggle-left-area'); }")
            page.run_all()
            page.tab.wait_for_selector(".ftw-goal", timeout=60_000)
            _show(page.tab, show)
            page.tab.mouse.move(5, 5)
            page.tab.wait_for_timeout(600)
            page.tab.locator(".jp-Notebook .jp-Cell").first.screenshot(path=str(target))


def _show(tab: Any, show: str) -> None:
    if show == "monitor":
        tab.click("[data-tab=launch]")
        tab.click(".ftw-launch button")
        tab.wait_for_function(
            "document.querySelector('.ftw-share')?.textContent.match(/step (\\d+)/)?.[1] > 200", timeout=240_000
        )
        return
    tab.click(f"[data-tab={show}]")
    tab.wait_for_timeout(4000)
    if show == "preview":
        tab.wait_for_selector(".ftw-rows .ftw-trained", timeout=90_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", type=Path, default=DOCS / "notebook.png")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--show", default="monitor")
    options = parser.parse_args()
    picture(options.target, dark=options.dark, show=options.show)


if __name__ == "__main__":
    main()
