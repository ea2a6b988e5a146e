"""What `workbench` opens on: runs that go on, what was done last, and ways to begin. Enter opens; after a run one comes back here.

The folders are read in a thread, so the first frame waits for none of them; what is shown follows them every other second. What
knows configs is half of all that the app imports: it comes once the lines stand.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import Screen

from engine.errors import WorkbenchError, redact, visible
from engine.hardware import machine_text, this_machine
from engine.run.index import peek
from engine.run.store import RunFolder
from engine.session.start import BEGIN, Entry, Section, StartList
from workbench.actions import bindings
from workbench.panels.bars import KeyLine, PassingLine, TitleBar
from workbench.panels.start_table import StartTable
from workbench.screens.run_actions import RunActions
from workbench.unsaved import UnsavedConfig

if TYPE_CHECKING:
    from engine.session.draft import Draft
    from workbench.app import WorkbenchApp

LOOK_SECONDS = 2.0


class _Lines:
    """What threads read for the screen, which draws it: what there is to open, the number of runs, this machine, what was left."""

    def __init__(self, list_: StartList) -> None:
        self.list = list_
        self.sections: list[Section] = [Section("Begin", BEGIN)]
        self.left: list[UnsavedConfig] = []
        self.runs, self.machine = 0, ""
        self.listed = False
        """Whether the folders' lines have been read: configs are read after that."""

    def read(self, height: int) -> bool:
        """The runs and configs for so many lines, and whether it is the first time: then by what the folders hold, without
        opening a config."""
        first, self.listed = not self.listed, True
        self.sections = self.list.sections(height, read=not first)
        self.runs = self.list.runs
        return first

    def unsaved(self, draft: Draft | None) -> list[Section]:
        """This window's own config where no file holds it, then those that earlier windows left."""
        entries = []
        if draft is not None and draft.dirty:
            entries.append(
                Entry("unsaved", "open", _name(draft.path, draft.recipe), word="open", detail="changed, not saved yet")
            )
        for number, kept in enumerate(self.left):
            detail = f"was not saved, {kept.clock}"
            entries.append(Entry("unsaved", str(number), _name(kept.path, kept.recipe), word="left", detail=detail))
        return [Section("Not saved", tuple(entries))] if entries else []


class StartScreen(Screen[None]):
    """Where one comes in, and where one comes back to."""

    app: WorkbenchApp
    NAME = "start"
    BINDINGS: ClassVar[list[BindingType]] = bindings("start")
    DEFAULT_CSS = """
    StartScreen StartTable { height: 1fr; margin-top: 1; }
    """

    def __init__(self, runs_dir: Path, list_: StartList) -> None:
        super().__init__()
        self._lines = _Lines(list_)
        self._runs_dir = runs_dir
        self.actions = RunActions(self, lambda words, seconds: self.line.show_message(words))

    def compose(self) -> ComposeResult:
        """Title, lines, keys."""
        self.title_bar, self.table, self.line = TitleBar(), StartTable(), PassingLine()
        yield self.title_bar
        yield self.table
        yield self.line
        yield KeyLine("start")

    def on_mount(self) -> None:
        """Draw the ways to begin at once; what the folders hold follows."""
        self._draw()
        self.table.focus()
        self._poll()
        self.set_interval(LOOK_SECONDS, self._poll)
        self.run_worker(self._read_once, thread=True, group="once", exit_on_error=True)

    def on_unmount(self) -> None:
        """What was begun here ends here."""
        self.actions.close()

    # What is shown

    @on(events.ScreenResume)
    @on(events.Resize)
    def _poll(self) -> None:
        """Read the folders: every other second, and at once back from elsewhere or in a window of another height."""
        if self.is_current and not any(worker.group == "start" and worker.is_running for worker in self.workers):
            self.run_worker(self._read, thread=True, group="start", exit_on_error=True)

    def _read(self) -> None:
        first = self._lines.read(self.app.size.height - 6)
        self.call_later(self._draw)
        if first:
            self.call_later(self.call_after_refresh, self._read_further)

    def _read_further(self) -> None:
        """What configs say, and what the next key needs, once the lines stand."""
        self.run_worker(self._read_configs, thread=True, group="start", exit_on_error=True)

    def _read_configs(self) -> None:
        import engine.session.opening  # noqa: F401 - also where no config is listed: the next key opens one

        self._read()

    def _read_once(self) -> None:
        self._lines.left = self.app.history.unsaved.left(None)
        self.call_later(self._draw)
        self._lines.machine = machine_text(this_machine())
        self.call_later(self._draw)

    def _draw(self) -> None:
        lines = self._lines
        self.table.show([*lines.unsaved(self.app.ending.draft), *lines.sections])
        runs = f"{lines.runs:,} run{'s' if lines.runs != 1 else ''}" if lines.runs else ""
        self.title_bar.show("", False, lines.machine, runs)

    # What is opened

    def action_open(self) -> None:
        """Open what is under the cursor."""
        if self.table.chosen is not None:
            self._open(self.table.chosen)

    @on(StartTable.Opened)
    def _clicked(self, event: StartTable.Opened) -> None:
        self._open(event.entry)

    def _open(self, entry: Entry) -> None:
        if entry.kind == "run":
            from workbench.screens.monitor import MonitorScreen

            self.app.push_screen(MonitorScreen(RunFolder(self._runs_dir / entry.key)))
        elif entry.kind == "config":
            self.open_file(Path(entry.key))
        elif entry.key == "open":
            self.app.action_build()
        elif entry.kind == "unsaved":
            self._go_on(int(entry.key))
        elif entry.key == "guide":
            self.app.action_show("guide")
        elif entry.key == "demo":
            self._begin("launch")
        elif entry.key == "new":
            self.action_new()
        else:
            self.action_file()

    def action_do(self, what: str) -> None:
        """Something with the run under the cursor."""
        entry = self.table.chosen
        if entry is None or entry.kind != "run":
            self.line.show_message("It is for a run: put the cursor on one.")
            return
        run = RunFolder(self._runs_dir / entry.key)
        self.actions.do(what, run, peek(run).view)

    def action_new(self) -> None:
        """A new config, at its first question."""
        self._begin("goal")

    def _begin(self, step: str) -> None:
        from engine.session.draft import Draft

        self.app.navigation.build(Draft.new("demo"), step)

    def action_file(self) -> None:
        """Open a file by its path."""
        from engine.session.browsing import CONFIGS, Wanted
        from workbench.screens.browse import Browse

        def answered(name: str | None) -> None:
            if name:
                self.open_file(Path(name).expanduser())

        want = Wanted("config", CONFIGS)
        self.app.push_screen(
            Browse("Open a config file", "", want, base=Path.cwd(), recent=self._lines.list.files), answered
        )

    def open_file(self, path: Path) -> None:
        """A config in the form; one of another tool as what becomes of it."""
        from engine.session.draft import Draft
        from engine.session.opening import open_config, open_step

        try:
            opened = open_config(path)
        except (WorkbenchError, OSError) as problem:
            self.line.show_message(visible(redact(str(problem))), bad=True)
            return
        if isinstance(opened, Draft):
            self.app.history.recent.note(path)
            self.app.navigation.build(opened, open_step(opened))
        else:
            from workbench.screens.ledger import LedgerScreen

            self.app.push_screen(LedgerScreen(opened))

    def _go_on(self, number: int) -> None:
        """With what an earlier window left; a file that it came from is its file again."""
        try:
            draft = self._lines.left[number].draft()
        except WorkbenchError as problem:
            self.line.show_message(visible(problem.message), bad=True)
            return

        def gone() -> None:
            del self._lines.left[number]

        self.app.navigation.build(draft, "goal", then=gone)

    def on_key(self) -> None:
        """What was said in passing has been read."""
        self.line.clear_message()


def _name(path: Path | None, recipe: str | None) -> str:
    return path.name if path is not None else f"from recipe {recipe}" if recipe else "new config"
