"""What a person can do with a run, from each screen that shows runs: ask it, talk to it, measure it, take it along.

Going on with one that ended is `Resuming`'s; what may take long runs `Beside` the screen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen

from engine.errors import Cancelled, WorkbenchError
from engine.figures import brief, progress
from engine.run import control, stack
from engine.run.ending import End
from engine.run.evaluations import INSTALL, Evaluation, has_harness, step_of, summary, tasks_of
from engine.run.index import peek
from engine.run.stopping import NAMES, Way, ways
from engine.run.store import RunFolder, runs_in
from workbench.panels.paint import clean, wrap
from workbench.panels.path_suggester import PathSuggester
from workbench.screens.dialog import Ask, Item, Pick, Show
from workbench.screens.resuming import Resuming
from workbench.screens.screen_thread import LONG, SECONDS, Beside

if TYPE_CHECKING:
    from engine.run.view import RunView

OTHERS = 200
"""Runs that are offered to compare with, the newest first."""
STOP_EVERY = 1.0
"""Seconds between two looks at what the ways to stop keep."""
LETTERS = {"save_stop": "s", "checkpoint": "c", "end_of_epoch": "e", "stop": "n"}


class RunActions:
    """The actions of one screen. `show_message` shows words on it for so many seconds; `changed` is called when a run has new facts,
    `started` with a run that was started in the place of another."""

    def __init__(
        self,
        screen: Screen[None],
        show_message: Callable[[str, float], None],
        changed: Callable[[], object] = lambda: None,
        started: Callable[[RunFolder], object] = lambda run: None,
    ) -> None:
        self._screen, self._show_message, self._changed = screen, show_message, changed
        self._beside = Beside(screen, show_message, changed)
        self._resuming = Resuming(screen, self._beside, started)
        self._asked: tuple[str, str, float] | None = None
        self._measuring: Evaluation | None = None

    def do(self, what: str, run: RunFolder, view: RunView) -> None:
        """One of them, by the word of the table of actions."""
        try:
            {
                "stop": lambda: self._stop(run, view),
                "checkpoint": lambda: self._ask(run, "checkpoint"),
                "stack": lambda: self._stack(run),
                "resume": lambda: self._resuming.resume(run, view),
                "chat": lambda: self._chat(run),
                "evaluate": lambda: self._evaluate(run),
                "tasks": lambda: self._tasks(run),
                "export": lambda: self._export(run),
                "longer": lambda: self._resuming.longer(run, view),
                "prune": lambda: self._prune(run, view),
                "compare": lambda: self._compare(run),
            }[what]()
        except WorkbenchError as problem:
            self._show_message(problem.full_message, SECONDS)

    def close(self) -> None:
        """What was begun for this screen alone ends with it."""
        if self._measuring is not None:
            self._measuring.cancel()

    def waiting(self, view: RunView) -> str:
        """A request that the run has not answered yet, in words."""
        if self._asked is None:
            return ""
        name, do, since = self._asked
        if control.answer(view, name) is not None or view.over:
            self._asked = None
            return ""
        return f"{NAMES[do]}: asked {brief(time.monotonic() - since)} ago; the run answers between two steps"

    # A run that goes on

    def _stop(self, run: RunFolder, view: RunView) -> None:
        if view.over:
            self._show_message(f"This run is {view.state}; there is nothing to stop.", SECONDS)
        else:
            self._screen.app.push_screen(
                StopMenu(view, lambda: peek(run).view), lambda do: self._ask(run, do) if do else None
            )

    def _ask(self, run: RunFolder, do: str) -> None:
        try:
            self._asked = (control.request(run, do, by="the app"), do, time.monotonic())
        except WorkbenchError as problem:
            self._show_message(problem.full_message, SECONDS)
        else:
            self._changed()

    def _stack(self, run: RunFolder) -> None:
        def show(frames: str) -> None:
            self._show_message("", 0)
            self._screen.app.push_screen(Show(f"Where the worker of {clean(run.id)} is", frames))

        self._show_message("asking the worker where it is …", 60)
        self._beside.run("stack", lambda: stack.ask(run), show)

    # A run that ended

    def first_way(self, run: RunFolder, view: RunView, end: End) -> None:
        """What Enter does on the card of a run that is over."""
        if view.state == "finished":
            self.do("chat", run, view)
        else:
            self._resuming.first_way(run, view, end)

    def _chat(self, run: RunFolder) -> None:
        from workbench.screens.chat import ChatScreen, chat_of

        self._screen.app.push_screen(ChatScreen(chat_of(run)))

    def _tasks(self, run: RunFolder) -> None:
        if self._measuring is not None:
            self._measuring.cancel()
            return
        step_of(run, None)

        def answered(path: str | None) -> None:
            if not path:
                return
            try:
                self._evaluate(run, tasks_of([path], "task"))
            except WorkbenchError as problem:
                self._show_message(problem.full_message, SECONDS)

        if not has_harness():
            raise WorkbenchError("task: needs lm-evaluation-harness, which is not installed.", INSTALL)
        title, note = f"Score {clean(run.id)} by which task", "A YAML file of lm-evaluation-harness; enter begins"
        self._screen.app.push_screen(Ask(title, "", note, PathSuggester(Path.cwd())), answered)

    def _evaluate(self, run: RunFolder, tasks: Sequence[Path] = ()) -> None:
        if self._measuring is not None:
            self._measuring.cancel()
            return
        measuring = self._measuring = Evaluation(run, step_of(run, None), base=True, tasks=tasks)

        def report(message: dict[str, Any]) -> None:
            state = message["progress"]
            of = f" {progress({**state, 'unit': 'rows'})} rows" if state["total"] > 1 else ""
            self._screen.call_later(self._show_message, f"{state['what']}{of} …  the same key cancels", LONG)

        def work() -> str:
            try:
                record, _ = measuring.measure(report)
            except Cancelled as stopped:
                return stopped.message
            finally:
                self._measuring = None
            return summary(record)

        self._show_message("starting …  the same key cancels", LONG)
        self._beside.run("evaluate", work, self._beside.finished)

    def _export(self, run: RunFolder) -> None:
        from engine.export.places import source
        from workbench.screens.export import ExportScreen

        source(run, hashes=False)
        self._screen.app.push_screen(ExportScreen(run))

    def _prune(self, run: RunFolder, view: RunView) -> None:
        from engine.run.pruning_choice import Choice, remove
        from workbench.screens.prune import PruneScreen

        if not view.over:
            words = f"This run is {view.state} and removes older checkpoints itself; run.save_total_limit says how many stay."
            self._show_message(words, SECONDS)
            return

        def agreed(choice: Choice | None) -> None:
            if choice is None:
                return
            steps = {each.step for each in choice.go}
            self._show_message(f"reading what stays whole, then removing {choice.count()} …", LONG)
            self._beside.run("prune", lambda: remove(run, choice.keep, steps).removed(), self._beside.finished)

        self._screen.app.push_screen(PruneScreen(run), agreed)

    def _compare(self, run: RunFolder) -> None:
        from workbench.screens.compare import CompareScreen

        others = [other for other in runs_in(run.path.parent) if other.id != run.id]
        others.sort(key=lambda other: other.path.stat().st_mtime, reverse=True)
        items = [
            Item(str(other.path), Content(clean(other.id)), search_text=other.id.lower()) for other in others[:OTHERS]
        ]

        def answered(choice: str | None) -> None:
            if choice:
                self._screen.app.push_screen(CompareScreen([run, RunFolder(choice)]))

        empty = "There is no other run in its folder yet."
        self._screen.app.push_screen(Pick(f"Lay beside {clean(run.id)}", items, filtered=True, empty=empty), answered)


class StopMenu(Pick):
    """Gives one of the words of `engine.run.control`, or nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(letter, f"take('{do}')", show=False) for do, letter in LETTERS.items()
    ]

    def __init__(self, view: RunView, look: Callable[[], RunView]) -> None:
        super().__init__("How should it stop?", [_item(way) for way in ways(view)])
        self._look = look

    def on_mount(self) -> None:
        """The run goes on while one thinks, so what each way keeps changes."""
        self.set_interval(STOP_EVERY, self._recount)

    def _recount(self) -> None:
        self.replace([_item(way) for way in ways(self._look())])

    def action_take(self, do: str) -> None:
        """The way with this letter."""
        self.dismiss(do)


def _item(way: Way) -> Item:
    title = Content.assemble((f"{LETTERS[way.do]}  ", "bold $accent"), (way.title, "bold"))
    return Item(way.do, title, Content("\n".join(f"   {line}" for line in wrap(way.keeps, 55))))
