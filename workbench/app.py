"""The app's frame: signals, the draft and the inspector that the screens share, and leaving with a word.

Owns the draft, the lazily started inspector and the current screen, nothing else. It never imports torch; whatever
needs torch is asked of the inspector's process. One decision worth knowing: an unhandled error, SIGTERM and SIGHUP all
leave by the same door, which gives the terminal back, keeps an unsaved draft in a file and sets the exit code.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.segment import Segment, Segments
from textual import events
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.css.stylesheet import Stylesheet
from textual.geometry import Size
from textual.screen import Screen
from textual.widgets import Static

from engine.errors import redact, visible
from workbench.actions import bindings, keymap
from workbench.crash import keep_details, state_folder
from workbench.gate import StripControls, TolerantDriver
from workbench.palette import ActionProvider
from workbench.terminal import few_colours, settle_colour, wants_light
from workbench.theme import DARK, THEMES, theme_name

if TYPE_CHECKING:
    from engine.bridge.ledger import Ledger
    from engine.client import Inspector
    from engine.run.store import RunFolder
    from engine.session.chat import ChatSession
    from engine.session.draft import Draft
    from engine.session.recent import Recent
    from engine.session.start import StartList
    from workbench.screens.start import StartScreen
    from workbench.unsaved import Unsaved


LEAVE_SECONDS = 3.0  # a terminal that is gone takes no more writes; after this the process ends regardless


LEAST = (60, 16)


def lacks_room(size: Size) -> bool:
    """Whether a window of this size is too small."""
    return size.width < LEAST[0] or size.height < LEAST[1]


class TooSmall(Screen[None]):
    """The window is too small to be of use. What stands below it is not seen, so that no key may act there."""

    ACTS: ClassVar[frozenset[str]] = frozenset({"leave_all", "interrupt", "suspend_process"})

    def compose(self) -> ComposeResult:
        """One sentence."""
        yield Static(
            f"The workbench needs {LEAST[0]} columns and {LEAST[1]} rows. Make the window larger, or leave with ^q.",
            markup=False,
        )

    def on_screen_resume(self) -> None:
        """There may be room again once a question that stood over it is answered."""
        self.call_later(self.go)

    def go(self) -> None:
        """Leave, if there is room now."""
        if self.is_current and not lacks_room(self.app.size):
            self.app.pop_screen()


class Ending:
    """How the app ends: by a person's word, a signal, or an error of ours, all by the same door.

    The terminal is given back, a draft that no file holds is kept, and what goes on without the window is named with the
    command that shows it again.
    """

    def __init__(self, app: WorkbenchApp) -> None:
        self._app = app

    @property
    def draft(self) -> Draft | None:
        """The config being built, where one was looked at."""
        return self._app.__dict__.get("draft")

    def listen(self) -> None:
        """Signals end the app through its own door, so that the terminal is given back."""
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._by_signal, number)
        if not self._app.is_headless and os.isatty(0):
            threading.Thread(target=_end_with_terminal, name="hangup", daemon=True).start()

    def _by_signal(self, number: signal.Signals) -> None:
        code = 128 + number
        self._app.left = True
        self.keep_draft()
        end = threading.Timer(LEAVE_SECONDS, os._exit, (code,))
        end.daemon = True
        end.start()
        self._app.exit(return_code=code)

    def by_error(self, problem: BaseException | None) -> str:
        """An error of ours: details without local variables into a file, one sentence to the person."""
        where = keep_details(problem)
        kept = self.keep_draft()
        name = type(problem).__name__ if problem else "an error"
        words = f"The app stopped on {name}: {str(problem)[:300]}. {where} {kept}".rstrip()
        return visible(redact(words))

    def by_word(self) -> None:
        """Quit, and say what goes on without this window; asks where a config would be lost."""
        from workbench.screens.leave import LeaveScreen

        app = self._app
        if self.draft is not None and self.draft.dirty and not isinstance(app.screen, LeaveScreen):
            app.push_screen(LeaveScreen(self.draft), lambda answer: self._leave() if answer == "leave" else None)
        else:
            self._leave()

    def _leave(self) -> None:
        from workbench.screens.leave import what_goes_on

        app = self._app
        app.left = True
        app.history.unsaved.give_up()
        app.goodbye += what_goes_on(app.runs_dir)
        app.exit()

    def keep_draft(self) -> str:
        """Write an unsaved draft beside the app's log, to be offered at the next start; the sentence says where."""
        app, draft = self._app, self.draft
        if draft is None or not draft.dirty:
            return ""
        try:
            entry = app.history.unsaved.entry(draft)
            place = app.history.unsaved.as_file(draft.text())
            app.history.unsaved.write(entry, file=place)
        except OSError as problem:
            return f"The unsaved config could not be kept: {problem.strerror}."
        sentence = f"The unsaved config is in {place}; `workbench {place}` opens it."
        app.goodbye.append(sentence)
        return sentence

    def messages(self) -> list[str]:
        """What is said when the window is closed: at least the way back."""
        from workbench.screens.leave import way_back

        app = self._app
        if any("`workbench" in line for line in app.goodbye):
            return app.goodbye
        return [*app.goodbye, way_back(app.watched, self.draft)]


def _end_with_terminal() -> None:
    """Waits for the terminal to be gone, without a look at a clock, and ends the app as SIGHUP does. The signal goes to the
    session's first process alone: `make workbench` takes it and waits, and an app whose writes nobody takes waits as well."""
    watch = select.poll()
    watch.register(0, 0)
    if any(event & select.POLLHUP for _, event in watch.poll()):
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(2 * LEAVE_SECONDS)
        os._exit(128 + signal.SIGHUP)  # its loop waits for a write and has heard no signal


class EarlyKeys:
    """Keys typed before the first frame: nothing has the focus yet that could take them."""

    def __init__(self, app: WorkbenchApp) -> None:
        self._app = app
        self._keys: list[events.Key] | None = []
        """None once they are handed on."""

    def hold(self, event: events.Event) -> bool:
        """Keep a key that comes too early; False for all else."""
        if self._keys is None or not isinstance(event, events.Key):
            return False
        self._keys.append(event)
        return True

    async def hand_on(self, tries: int = 50) -> None:
        """One by one; those typed meanwhile stand behind them."""
        if not self._app.screen_stack:  # the app was left before
            return
        if self._app.screen.focused is None and tries:  # a screen without anything to focus has them after a second
            self._app.set_timer(0.02, lambda: self.hand_on(tries - 1))
            return
        while self._keys:
            await App.on_event(self._app, self._keys.pop(0))
        self._keys = None


class History:
    """What windows leave for later ones: the configs that were opened, those that no file holds, and the runs."""

    def __init__(self, app: WorkbenchApp) -> None:
        self._app = app

    @cached_property
    def unsaved(self) -> Unsaved:
        """What is kept of a draft that no file holds, for the case that this window is ended from outside."""
        from platformdirs import user_cache_path

        from workbench.unsaved import Unsaved

        return Unsaved(user_cache_path("workbench"), state_folder())

    @cached_property
    def recent(self) -> Recent:
        """The configs that were opened or saved last."""
        from engine.session.recent import Recent

        return Recent(state_folder())

    @cached_property
    def start_list(self) -> StartList:
        """Runs and configs to come back to, and the models and rows that they name."""
        from platformdirs import user_cache_path

        from engine.session.start import StartList

        return StartList(self._app.runs_dir, self.recent, user_cache_path("workbench"))


class Navigation:
    """Which screen stands: the first one, the start, the form of this window's config, and the way back."""

    def __init__(
        self,
        app: WorkbenchApp,
        run: RunFolder | None,
        ledger: Ledger | None,
        chat: ChatSession | None,
        start: bool,
        step: str,
    ) -> None:
        self._app = app
        self._run, self._ledger, self._chat = run, ledger, chat
        self._start, self._step = start, step

    def first(self) -> Screen[Any]:
        """What was asked for: a chat, a run, the ledger of a config of another tool, the start, or the form."""
        if self._chat is not None:
            from workbench.screens.chat import ChatScreen

            return ChatScreen(self._chat)
        if self._run is not None:
            from workbench.screens.monitor import MonitorScreen

            return MonitorScreen(self._run)
        if self._ledger is not None:
            from workbench.screens.ledger import LedgerScreen

            return LedgerScreen(self._ledger)
        if self._start:
            return self._start_screen()
        from workbench.screens.build import BuildScreen

        return BuildScreen(self._step)

    def _start_screen(self) -> StartScreen:
        from workbench.screens.start import StartScreen

        return StartScreen(self._app.runs_dir, self._app.history.start_list)

    def show(self, screen: Callable[..., Screen[Any]], *args: Any) -> None:
        """Open a screen that nothing is lost by leaving, unless it is what stands."""
        if not isinstance(self._app.screen, screen):  # type: ignore[arg-type]
            self._app.push_screen(screen(*args))

    def show_start(self) -> None:
        """The start, or back to it if it is open."""
        from workbench.screens.start import StartScreen

        app = self._app
        if any(isinstance(screen, StartScreen) for screen in app.screen_stack):
            while not isinstance(app.screen, StartScreen):
                app.pop_screen()
        else:
            app.push_screen(self._start_screen())

    def back(self) -> bool:
        """To the screen below; False where there is none to go to."""
        app = self._app
        if len(app.screen_stack) < 2 or self._is_old(app.screen_stack[-2]):
            return False
        app.pop_screen()
        return True

    def build(self, draft: Draft, step: str, then: Callable[[], object] = lambda: None) -> None:
        """Open the form on another config; asks first where this window's own would be lost. `then` follows if it was opened."""
        from workbench.screens.leave import LeaveScreen

        def open_it(answer: str | None) -> None:
            if answer == "leave":
                self._app.draft = draft
                then()
                self.show_build(step)

        now = self._app.ending.draft
        if now is not None and now.dirty:
            self._app.push_screen(LeaveScreen(now), open_it)
        else:
            open_it("leave")

    def show_build(self, step: str) -> None:
        """The form of this window's config: the one that is open, or a new one in place of that of another config."""
        from workbench.screens.build import BuildScreen

        forms = [screen for screen in self._app.screen_stack if isinstance(screen, BuildScreen)]
        if forms:
            while self._app.screen is not forms[-1]:
                self._app.pop_screen()
        if not forms or (
            self._is_old(forms[-1]) and len(self._app.screen_stack) == 1
        ):  # the lowest screen cannot be replaced
            self._app.push_screen(BuildScreen(step))
        elif self._is_old(forms[-1]):
            self._app.switch_screen(BuildScreen(step))

    def _is_old(self, screen: Screen[Any]) -> bool:
        """Whether this is the form of a config that is no longer this window's; it is not shown again."""
        from workbench.screens.build import BuildScreen

        return isinstance(screen, BuildScreen) and screen.session.draft is not self._app.draft


class ReadOnce(Stylesheet):
    """Style sheets that are read anew where a colour has changed. Textual has them read twice as an app starts, with the same ones."""

    def __init__(self, *, variables: dict[str, str]) -> None:
        self._colours = dict(variables)
        self._changed = False
        super().__init__(variables=variables)

    def set_variables(self, variables: dict[str, str]) -> None:
        """Take these colours."""
        self._changed = self._changed or variables != self._colours
        self._colours = dict(variables)
        super().set_variables(variables)

    def reparse(self) -> None:
        """Read them with the colours of now; what was added since is read when it is needed."""
        if self._changed:
            super().reparse()
            self._changed = False


class WorkbenchApp(App[None]):
    """The workbench in a terminal."""

    CSS_PATH = "theme.tcss"
    TITLE = "workbench"
    BINDINGS: ClassVar[list[BindingType]] = bindings("everywhere")
    COMMANDS = {ActionProvider}
    ESCAPE_TO_MINIMIZE = False

    def __init__(
        self,
        draft: Draft | None = None,
        run: RunFolder | None = None,
        runs_dir: str | os.PathLike[str] | None = None,
        *,
        start: bool = False,
        step: str = "goal",
        ledger: Ledger | None = None,
        chat: ChatSession | None = None,
    ) -> None:
        """`start` opens on what there is to come back to, else `step` is where the draft's form begins."""
        no_colour = settle_colour()
        super().__init__(driver_class=TolerantDriver, ansi_color=True if no_colour else None)
        self._draft = draft
        self.navigation, self.history = Navigation(self, run, ledger, chat, start, step), History(self)
        self._early = EarlyKeys(self)
        self.explicit_runs_dir = Path(runs_dir).absolute() if runs_dir is not None else None
        self._runs_dir = self.explicit_runs_dir
        self._inspector: Inspector | None = None
        self.goodbye: list[str] = []
        self.watched: RunFolder | None = None
        """The run that was looked at last."""
        self.left = False
        self.ending = Ending(self)
        for theme in THEMES:
            self.register_theme(theme)
        self._ansi = no_colour or few_colours()
        self.theme = theme_name(self._ansi, not wants_light())
        self.stylesheet = ReadOnce(variables=self.get_css_variables())

    # What the screens share

    @cached_property
    def draft(self) -> Draft:
        """The config being built; the demo's until the person opens another."""
        from engine.session.draft import Draft

        return self._draft if self._draft is not None else Draft.new("demo")

    @property
    def inspector(self) -> Inspector:
        """The process that knows tokenizers, started by the first question."""
        if self._inspector is None:
            from engine.client import Inspector

            self._inspector = Inspector()
        return self._inspector

    @property
    def runs_dir(self) -> Path:
        """Where runs lie."""
        if self._runs_dir is None:
            from engine.run.store import runs_dir

            self._runs_dir = runs_dir()
        return self._runs_dir

    # Frame

    def get_default_screen(self) -> Screen[Any]:
        """The first screen is the chat or the run that was asked for, or the form."""
        return self.navigation.first()

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Values for a theme that is not ours."""
        return DARK

    def get_line_filters(self) -> list[Any]:
        """The gate stands last, after whatever drew the line."""
        return [*super().get_line_filters(), StripControls()]

    async def on_event(self, event: events.Event) -> None:
        """Keys typed before the first frame wait for it: nothing has the focus yet that could take them."""
        if not self._early.hold(event):
            await super().on_event(event)

    def on_ready(self) -> None:
        """The first frame is painted: collect garbage again, but not in what was imported."""
        gc.freeze()
        gc.enable()
        from platformdirs import user_config_path

        mine, problem = keymap(user_config_path("workbench") / "keys.json")  # the person's own
        if mine:
            self.set_keymap(dict(mine))
        if problem:
            self.notify(visible(redact(problem)), severity="warning", markup=False)
        # Behind what the screen has yet to do: on a busy machine it may not have given the focus to its form by now.
        if self.screen_stack:  # an app that was closed before its first frame has none any more
            self.screen.call_later(self._early.hand_on)

    def on_resize(self, event: events.Resize) -> None:
        """Too little room: a sentence stands over whatever is open, and goes when there is room."""
        small = lacks_room(event.size)
        if small and not any(isinstance(screen, TooSmall) for screen in self.screen_stack):
            self.push_screen(TooSmall())
        elif not small and isinstance(self.screen, TooSmall):
            self.pop_screen()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether an action of the app may be done now."""
        return super().check_action(action, parameters) and (
            not isinstance(self.screen, TooSmall) or action in TooSmall.ACTS
        )

    def on_mount(self) -> None:
        """Signals end the app through its own door."""
        self.ending.listen()

    def on_unmount(self) -> None:
        """Nothing that was started here stays behind."""
        if self._inspector is not None:
            self._inspector.close()

    def _fatal_error(self) -> None:
        """An error of ours: one sentence to the person."""
        self._exit_renderables.append(Segments([Segment(self.ending.by_error(self._exception)), Segment.line()]))
        self._close_messages_no_wait()

    # Actions that work everywhere

    def action_show(self, what: str) -> None:
        """The `help` of this screen, the list of `runs`, or the `guide` of a first run, if it is not what stands."""
        if what == "help":
            from workbench.screens.help import HelpScreen

            self.navigation.show(HelpScreen, getattr(self.screen, "NAME", ""))
        elif what == "runs":
            from workbench.screens.runs import RunsScreen

            self.navigation.show(RunsScreen, self.runs_dir)
        else:
            from workbench.screens.guide import GuideScreen

            self.navigation.show(GuideScreen)

    def action_shade(self) -> None:
        """Light or dark."""
        self.theme = theme_name(self._ansi, not self.current_theme.dark)

    def action_build(self) -> None:
        """The seven steps; back to them if they are open."""
        self.navigation.show_build("goal")

    def action_start(self) -> None:
        """What goes on, what was open last, and ways to begin."""
        self.navigation.show_start()

    def action_leave(self) -> None:
        """Back; on the last screen, quit."""
        if not self.navigation.back():
            self.action_leave_all()

    def action_leave_all(self) -> None:
        """Quit; asks only when something would be lost."""
        self.ending.by_word()

    action_interrupt = action_leave_all  # Ctrl+C asks to quit; twice is not needed
