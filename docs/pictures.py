"""Renders the README's pictures from the real app and the real widget: `make pictures`. Needs chromium.

It trains the built-in demo once, in a folder of its own. While that goes on, `docs/pictures_notebook.py` photographs the
notebook that watches it; when it has ended, the app is opened headless at 80x24 over the same run and photographed.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("COLORTERM", "truecolor")
os.environ["TERM"] = "xterm-256color"
os.environ["WORKBENCH_THEME"] = "dark"

from engine.run.store import ENDED, find
from engine.session.draft import Draft
from workbench.app import WorkbenchApp
from workbench.screens.monitor import MonitorScreen
from workbench.screens.preview import PreviewScreen

DOCS = Path(__file__).parent


def to_png(svg: str, target: Path) -> None:
    """The terminal's SVG as a picture, with the machine's own monospace font."""
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f'<html><body style="margin:0;background:#0d1117">{svg}</body></html>', "utf-8")
        subprocess.run(
            [
                "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-background-networking", "--window-size=994,635", f"--screenshot={target}", page.as_uri(),
            ],
            check=True, capture_output=True,
        )  # fmt: skip


async def photograph(runs: Path, run: str) -> None:
    app = WorkbenchApp(draft=Draft.new("demo"), runs_dir=runs)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("4")
        await pilot.pause(3)
        to_png(app.export_screenshot(), DOCS / "build.png")
        screen = PreviewScreen(app.draft, app.inspector)
        app.push_screen(screen)
        while not screen.found:
            await pilot.pause(0.5)
        await pilot.pause(0.5)
        to_png(app.export_screenshot(), DOCS / "preview.png")
        app.push_screen(MonitorScreen(find(run, runs)))
        await pilot.pause(2)
        await pilot.press("1")  # a run that is over opens on its card
        await pilot.pause(1)
        to_png(app.export_screenshot(), DOCS / "monitor.png")


def main() -> None:
    if shutil.which("chromium") is None:
        sys.exit("chromium is not installed; it draws the pictures.")
    sys.path.append(str(DOCS))  # where PYTHONSAFEPATH is set, a script's own folder is not looked in
    from pictures_notebook import RUN, training

    with tempfile.TemporaryDirectory() as folder, training(Path(folder)) as runs:
        # A process of its own: an event loop of the browser's must not be near the app's.
        subprocess.run([sys.executable, str(DOCS / "pictures_notebook.py"), "--runs", str(runs)], check=True)
        while find(RUN, runs).state not in ENDED:
            time.sleep(1)
        asyncio.run(photograph(runs, RUN))


if __name__ == "__main__":
    main()
