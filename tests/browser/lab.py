"""A JupyterLab of its own and a Chromium to look at it: for the browser tests and for the pictures of the README.

Everything lies in one temporary folder and on loopback; `Page.outside` lists every request that left it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
IDLE = "document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status==='idle'"


def missing() -> str:
    """What this machine lacks for looking at a notebook, or nothing."""
    if shutil.which("chromium") is None:
        return "chromium is not installed"
    lacking = [name for name in ("jupyterlab", "playwright") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(lacking)} not installed" if lacking else ""


def write_notebook(path: Path, cells: list[str]) -> None:
    """A notebook of code cells, with the kernel named: without one JupyterLab asks, and swallows clicks."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, path)


@dataclass
class Lab:
    """A running server; notebooks lie in `root`."""

    root: Path
    url: str
    token: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serve(root: Path, **environment: str) -> Iterator[Lab]:
    """A JupyterLab on a free port, its settings in `root`, gone afterwards with all it started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    homes = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    env = {**os.environ, **{name: str(root / ".jupyter" / name.lower()) for name in homes}, **environment}
    env["JUPYTER_PREFER_ENV_PATH"] = "1"
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"]
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    command += ["--LabApp.expose_app_in_browser=True"]
    log = (root / "lab.log").open("wb")
    process = subprocess.Popen(
        command, env=env, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=root
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(f"{url}/api/status?token={token}", process)
        yield Lab(root, url, token, process)
    finally:
        _stop(url, token, process)
        log.close()


def _stop(url: str, token: str, process: subprocess.Popen[bytes]) -> None:
    """Asked to, the server ends its kernels too; on SIGTERM it waits for them much longer."""
    with contextlib.suppress(OSError):
        asked = urllib.request.Request(f"{url}/api/shutdown?token={token}", method="POST", data=b"")
        urllib.request.urlopen(asked, timeout=5).close()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(address: str, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + 90
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise TimeoutError("JupyterLab did not start within 90 s")


@dataclass
class Page:
    """A notebook in a browser tab."""

    tab: Any
    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def run_all(self) -> None:
        """Run every cell; the menu's order is lost until the kernel is connected, so it is given again."""
        self.tab.click(".jp-Notebook .jp-Cell >> nth=0")
        for _ in range(20):
            self.tab.get_by_role("menuitem", name="Run", exact=True).click()
            self.tab.get_by_text("Run All Cells", exact=True).click()
            with contextlib.suppress(Exception):
                self.tab.wait_for_function(
                    "document.querySelector('.jp-InputPrompt').textContent!=='[ ]:'", timeout=4_000
                )
                return
        raise TimeoutError("the notebook did not run")

    def theme(self, name: str) -> None:
        """`JupyterLab Dark` or `JupyterLab Light`."""
        self.tab.evaluate(
            """async (name) => {
                const app = window.jupyterapp ?? window.jupyterlab;
                if (app) await app.commands.execute('apputils:change-theme', {theme: name});
            }""",
            name,
        )
        self.tab.wait_for_timeout(800)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        try:
            yield chromium
        finally:
            chromium.close()


@contextlib.contextmanager
def opened(chromium: Any, lab: Lab, notebook: str, *, width: int = 1280, height: int = 1000) -> Iterator[Page]:
    """The notebook open with its kernel idle."""
    tab = chromium.new_page(viewport={"width": width, "height": height})
    page = Page(tab)
    tab.on(
        "request",
        lambda asked: (
            page.outside.append(asked.url)
            if asked.url.startswith(("http", "ws")) and f"//{lab.url.split('//')[1]}" not in asked.url
            else None
        ),
    )
    tab.on("pageerror", lambda error: page.errors.append(str(error)))
    try:
        tab.goto(f"{lab.url}/lab/tree/{notebook}?token={lab.token}&reset", wait_until="domcontentloaded")
        tab.wait_for_function(IDLE, timeout=90_000)
        yield page
    finally:
        tab.close()
