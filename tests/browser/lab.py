"""A JupyterLab of its own and a Chromium to look at it: for the browser tests and for the pictures of the README.

Everything lies in one temporary folder and on loopback. Chromium can resolve no name at all, and `Page.outside` lists
every request that tried to leave. No wait is longer than a minute, and one that is in vain says what was on the page.
Nothing awaits a promise of the page: a command that opens a dialog would never settle.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--disable-quic",
    "--no-first-run",
    "--no-pings",
    "--disable-background-networking",
    "--disable-client-side-phishing-detection",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-domain-reliability",
    "--disable-extensions",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-features=MediaRouter,OptimizationHints,Translate",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
UNNEEDED = [
    "csvviewer", "debugger", "extensionmanager", "htmlviewer", "hub", "imageviewer", "inspector", "lsp", "markdownviewer",
    "mathjax", "settingeditor", "terminal", "toc", "tooltip",
]  # fmt: skip
SECONDS = 60
# Playwright looks at every frame unless told otherwise, and so has every frame drawn.
POLL_MS = 150
READY = """() => {
    const shown = window.jupyterapp?.shell?.currentWidget;
    const session = shown?.context?.path === NOTEBOOK ? shown.sessionContext?.session : null;
    return session?.kernel?.connectionStatus === 'connected' && session.kernel.status === 'idle';
}"""
CLOSE = "() => { for (const each of [...window.jupyterapp.shell.widgets('main')]) each.dispose(); }"
RAN = """() => {
    const prompts = [...document.querySelectorAll('.jp-Notebook .jp-InputPrompt')].map((each) => each.textContent);
    return prompts.length > 0 && prompts.every((text) => /\\[\\d+\\]/.test(text));
}"""


def missing() -> str:
    """What this machine lacks for looking at a notebook, or nothing."""
    if shutil.which("chromium") is None:
        return "chromium is not installed"
    lacking = [name for name in ("jupyterlab", "playwright") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(lacking)} not installed" if lacking else ""


def write_notebook(path: Path, cells: list[str]) -> None:
    """A notebook of code cells, with the kernel named: without one JupyterLab asks, and swallows clicks."""
    import nbformat  # slow where JupyterLab is: its schema checker builds a grammar at import

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
def serve(root: Path, *, lean: bool = False, **environment: str) -> Iterator[Lab]:
    """A JupyterLab on a port that it finds itself, since another test may take one that was free before its imports; its settings
    in `root`, gone afterwards with all it started. `lean` without what no notebook needs, which takes a while of a processor to load."""
    token = secrets.token_hex(16)
    homes = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    env = {**os.environ, **{name: str(root / ".jupyter" / name.lower()) for name in homes}, **environment}
    env["JUPYTER_PREFER_ENV_PATH"] = "1"
    _quiet(Path(env["JUPYTER_CONFIG_DIR"]), UNNEEDED if lean else [])
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"]
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    command += ["--LabApp.expose_app_in_browser=True"]
    log = (root / "lab.log").open("wb")
    process = subprocess.Popen(
        command, env=env, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=root
    )
    url = ""
    try:
        url = f"http://127.0.0.1:{_port(Path(env['JUPYTER_RUNTIME_DIR']), process, root)}"
        _wait(f"{url}/api/status?token={token}", process, root)
        yield Lab(root, url, token, process)
    finally:
        _stop(url, token, process)
        log.close()


def _quiet(config: Path, without: list[str]) -> None:
    """No question about news, which would cover what lies beneath it, and no check whether JupyterLab is to be built."""
    page = {"buildCheck": False, "disabledExtensions": {f"@jupyterlab/{name}-extension": True for name in without}}
    news = "lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    for name, told in ((news, {"fetchNews": "false"}), ("labconfig/page_config.json", page)):
        (config / name).parent.mkdir(parents=True, exist_ok=True)
        (config / name).write_text(json.dumps(told), "utf-8")


def _port(folder: Path, process: subprocess.Popen[bytes], root: Path) -> int:
    """The port that the server wrote down once it listened there."""

    def written() -> dict[str, Any]:
        if process.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {process.returncode}: {_end_of(root / 'lab.log')}")
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((folder / f"jpserver-{process.pid}.json").read_text()))
        return {}

    until(written, "JupyterLab writes down its port", state=lambda: _end_of(root / "lab.log"))
    return int(written()["port"])


def _stop(url: str, token: str, process: subprocess.Popen[bytes]) -> None:
    """Asked to, the server ends its kernels too; on SIGTERM it waits for them much longer."""
    with contextlib.suppress(OSError, ValueError):  # without an address it had none yet
        asked = urllib.request.Request(f"{url}/api/shutdown?token={token}", method="POST", data=b"")
        urllib.request.urlopen(asked, timeout=5).close()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(address: str, process: subprocess.Popen[bytes], root: Path) -> None:
    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {process.returncode}: {_end_of(root / 'lab.log')}")
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    until(answers, "JupyterLab answers", state=lambda: _end_of(root / "lab.log"))


def _end_of(log: Path) -> str:
    return log.read_text("utf-8", "replace")[-1500:]


def until(check: Callable[[], Any], what: str, seconds: float = SECONDS, state: Callable[[], str] = str) -> None:
    """Waits for something outside the page. Raises AssertionError that says what did not come and how things stand."""
    give_up = time.monotonic() + seconds
    while not check():
        if time.monotonic() > give_up:
            raise AssertionError(f"waited {seconds:.0f} s in vain: {what}. {state()}".strip())
        time.sleep(0.1)


@dataclass
class Page:
    """A notebook in a browser tab."""

    tab: Any
    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def ready(self, notebook: str) -> None:
        self.shows(READY.replace("NOTEBOOK", json.dumps(notebook)), "the kernel is connected and idle")

    def run_all(self) -> None:
        """Run every cell and wait until each has run; an order that came too early is given again."""
        for _ in range(6):
            self.command("notebook:run-all-cells")
            with contextlib.suppress(AssertionError):
                self.shows("() => !document.querySelector('.jp-InputPrompt').textContent.includes('[ ]')", "a run", 5)
                break
        self.shows(RAN, "every cell has run")

    def command(self, name: str, **options: Any) -> None:
        """Gives JupyterLab an order and returns at once."""
        self.tab.evaluate(
            "([name, options]) => { window.jupyterapp.commands.execute(name, options); }", [name, options]
        )

    def shows(self, script: str, what: str, seconds: float = SECONDS) -> None:
        """Waits until a function of the page is true. Raises AssertionError with what is on the page instead."""
        from playwright.sync_api import TimeoutError as InVain

        try:
            self.tab.wait_for_function(script, timeout=seconds * 1000, polling=POLL_MS)
        except InVain:
            raise AssertionError(f"waited {seconds:.0f} s in vain: {what}. {self.state()}") from None

    def sees(self, selector: str, seconds: float = SECONDS, **options: Any) -> Any:
        """The first element of a selector once it is on screen. Raises AssertionError with what is there instead."""
        from playwright.sync_api import TimeoutError as InVain

        found = self.tab.locator(selector, **options).first
        try:
            found.wait_for(timeout=seconds * 1000)
        except InVain:
            words = f" with {options['has_text']!r}" if "has_text" in options else ""
            raise AssertionError(
                f"waited {seconds:.0f} s in vain: {selector}{words} on screen. {self.state()}"
            ) from None
        return found

    def state(self) -> str:
        """What a person would see now, in a few lines: dialog, notices, the outputs' text."""
        seen = self.tab.evaluate(
            """() => ['.jp-Dialog', '.ftw-notice:not([hidden])', '.jp-OutputArea-output', '.jp-InputPrompt'].map((each) =>
                `${each}: ${[...document.querySelectorAll(each)].map((one) => one.innerText.slice(0, 700)).join(' | ')}`)"""
        )
        return "\n".join([*seen, f"errors: {self.errors}", f"outside: {self.outside}"])

    def save(self, file: Path, holds: str) -> None:
        """Saves the notebook; done when its file holds a text."""
        self.command("docmanager:save")
        until(lambda: holds in file.read_text("utf-8"), f"the saved notebook holds {holds!r}", state=self.state)

    def theme(self, name: str) -> None:
        """`JupyterLab Dark` or `JupyterLab Light`."""
        self.command("apputils:change-theme", theme=name)
        self.shows(f"() => document.body.dataset.jpThemeName === '{name}'", f"the theme {name}")
        self.tab.wait_for_timeout(500)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    # Its handler of crashes is nobody's child and lives as long as it does, over the end of one file of tests: without
    # their marks it is not taken for a process that one of them left behind.
    unmarked = {name: value for name, value in os.environ.items() if not name.startswith("WORKBENCH_TESTS_")}
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS, env=unmarked)
        try:
            yield chromium
        finally:
            chromium.close()


def no_loop_is_left() -> None:
    """Raises AssertionError while an event loop runs in this thread: every asynchronous test after it would fail."""
    with contextlib.suppress(RuntimeError):
        left = asyncio.get_running_loop()
        raise AssertionError(
            f"an event loop still runs after the browser tests of this file, so no asynchronous test can run any more: "
            f"{left!r}. Close every browser that was opened (`with browsing.browser()`) behind the last of them."
        )


@contextlib.contextmanager
def opened(chromium: Any, lab: Lab, notebook: str, *, width: int = 1280, height: int = 1000) -> Iterator[Page]:
    """The notebook open in a tab of its own, its kernel connected and idle."""
    page = _loaded(chromium, lab, notebook, width, height)
    try:
        page.ready(notebook)
        yield page
    finally:
        page.tab.close()


def _loaded(chromium: Any, lab: Lab, notebook: str, width: int, height: int) -> Page:
    tab = chromium.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce")
    tab.set_default_timeout(SECONDS * 1000)
    page = Page(tab)

    def note(asked: Any) -> None:
        if asked.url.startswith(("http", "ws")) and f"//{lab.url.split('//')[1]}/" not in asked.url:
            page.outside.append(asked.url)

    tab.on("request", note)
    tab.on("websocket", note)
    tab.on("pageerror", lambda error: page.errors.append(str(error)))
    tab.on("dialog", lambda dialog: dialog.accept())
    tab.goto(f"{lab.url}/lab/tree/{notebook}?token={lab.token}&reset", wait_until="domcontentloaded")
    return page


@dataclass
class Window:
    """One tab for all tests, since JupyterLab takes seconds of a processor to load: notebooks are opened in it one after the
    other, each with a kernel of its own that ends with it. A test that failed leaves none to the next."""

    chromium: Any
    lab: Lab
    page: Page | None = None

    @contextlib.contextmanager
    def opened(self, notebook: str, *, width: int = 1280, height: int = 1000) -> Iterator[Page]:
        """The notebook open, its kernel connected and idle."""
        before, self.page = self.page, None
        if before is None:
            page = _loaded(self.chromium, self.lab, notebook, width, height)
        else:
            page = before
            page.tab.set_viewport_size({"width": width, "height": height})
            page.command("docmanager:open", path=notebook)
        page.ready(notebook)
        page.outside.clear()
        page.errors.clear()
        yield page
        page.tab.evaluate(CLOSE)
        self._end_kernels()
        self.page = page

    def _end_kernels(self) -> None:
        for session in json.loads(self._asked("GET", "")):
            self._asked("DELETE", f"/{session['id']}")

    def _asked(self, method: str, what: str) -> bytes:
        asked = urllib.request.Request(f"{self.lab.url}/api/sessions{what}?token={self.lab.token}", method=method)
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            return bytes(answer.read())
