"""The app's frame: themes, signals, the draft and the inspector that the screens share, and leaving with a word.

Owns the draft, the lazily started inspector and the current screen, nothing else. It never imports torch; whatever
needs torch is asked of the inspector's process. One decision worth knowing: an unhandled error, SIGTERM and SIGHUP all
leave by the same door, which gives the terminal back, keeps an unsaved draft in a file and sets the exit code.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import traceback
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.segment import Segment, Segments
from textual import events
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.screen import Screen
from textual.theme import BUILTIN_THEMES, Theme
from textual.widgets import Static

from engine.errors import redact, visible
from workbench.actions import bindings, keymap
from workbench.gate import StripControls, TolerantDriver
from workbench.palette import ActionProvider
from workbench.terminal import few_colours, settle_colour, wants_light

if TYPE_CHECKING:
    from engine.client import Inspector
    from engine.config.draft import Draft
    from engine.run.store import RunFolder
    from workbench.unsaved import Unsaved

# Greys of little saturation: where a terminal has 256 colours they become its greys, not its navy, teal or lavender.
DARK = {
    "wb-dim": "#8b949e", "wb-faint": "#6a737e", "wb-line": "#2d333b", "wb-cursor": "#343b45", "wb-field": "#1c2025",
    "wb-hint": "#79a8c9", "wb-cursor-text": "#d7dce2",
}  # fmt: skip
LIGHT = {
    "wb-dim": "#5c6570", "wb-faint": "#7d8590", "wb-line": "#d3d8de", "wb-cursor": "#d8dce1", "wb-field": "#eff0f2",
    "wb-hint": "#3d6f94", "wb-cursor-text": "#23282e",
}  # fmt: skip
ANSI = {
    **BUILTIN_THEMES["ansi-dark"].variables,
    "wb-dim": "ansi_default", "wb-faint": "ansi_bright_black", "wb-line": "ansi_bright_black", "wb-cursor": "ansi_blue",
    "wb-field": "ansi_black", "wb-hint": "ansi_cyan", "wb-cursor-text": "ansi_bright_white",
}  # fmt: skip
ANSI_LIGHT = {
    **ANSI, **BUILTIN_THEMES["ansi-light"].variables, "wb-cursor": "ansi_cyan", "wb-field": "ansi_white",
    "wb-hint": "ansi_blue", "wb-cursor-text": "ansi_black",
}  # fmt: skip
THEMES = (
    Theme(
        "workbench-dark", primary="#6cb6ff", accent="#6cb6ff", foreground="#d7dce2", background="#14171b", surface="#14171b",
        panel="#1c2025", success="#7cc58b", warning="#e0b050", error="#f47b72", dark=True, variables=DARK,
    ),
    Theme(
        "workbench-light", primary="#0b5cad", accent="#0b5cad", foreground="#23282e", background="#fbfbfa",
        surface="#fbfbfa", panel="#eff0f2", success="#1a7f37", warning="#8a5a00", error="#b42318", dark=False, variables=LIGHT,
    ),
    Theme(
        "workbench-ansi-dark", primary="ansi_bright_blue", accent="ansi_bright_cyan", foreground="ansi_default",
        background="ansi_default", surface="ansi_default", panel="ansi_default", boost="ansi_default",
        success="ansi_green", warning="ansi_yellow", error="ansi_bright_red", dark=True, ansi=True, variables=ANSI,
    ),
    Theme(
        "workbench-ansi-light", primary="ansi_blue", accent="ansi_blue", foreground="ansi_default",
        background="ansi_default", surface="ansi_default", panel="ansi_default", boost="ansi_default",
        success="ansi_green", warning="ansi_magenta", error="ansi_red", dark=False, ansi=True, variables=ANSI_LIGHT,
    ),
)  # fmt: skip
LEAVE_SECONDS = 3.0  # a terminal that is gone takes no more writes; after this the process ends regardless


LEAST = (60, 16)


class TooSmall(Screen[None]):
    """The window is too small to be of use."""

    def compose(self) -> ComposeResult:
        """One sentence."""
        yield Static(
            f"The workbench needs {LEAST[0]} columns and {LEAST[1]} rows. Make the window larger.", markup=False
        )


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
        runs_first: bool = False,
    ) -> None:
        no_colour = settle_colour()
        super().__init__(driver_class=TolerantDriver, ansi_color=True if no_colour else None)
        self._draft = draft
        self._run = run
        self._runs_first = runs_first
        self._early: list[events.Key] | None = []
        """Keys from before the first frame; None from then on."""
        self.explicit_runs_dir = Path(runs_dir).absolute() if runs_dir is not None else None
        self._runs_dir = self.explicit_runs_dir
        self._inspector: Inspector | None = None
        self.goodbye: list[str] = []
        self.left = False
        for theme in THEMES:
            self.register_theme(theme)
        self._ansi = no_colour or few_colours()
        self.theme = self._theme_name(not wants_light())

    # What the screens share

    @cached_property
    def draft(self) -> Draft:
        """The config being built; the demo's until the person opens another."""
        from engine.config.draft import Draft

        return self._draft if self._draft is not None else Draft.new("demo")

    @cached_property
    def unsaved(self) -> Unsaved:
        """What is kept of a draft that no file holds, for the case that this window is ended from outside."""
        from platformdirs import user_cache_path

        from workbench.unsaved import Unsaved

        return Unsaved(user_cache_path("workbench"), _state_folder())

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
        """The first screen is the run that was asked for, or the form."""
        if self._run is not None:
            from workbench.screens.monitor import MonitorScreen

            return MonitorScreen(self._run)
        from workbench.screens.build import BuildScreen

        return BuildScreen()

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Values for a theme that is not ours."""
        return DARK

    def get_line_filters(self) -> list[Any]:
        """The gate stands last, after whatever drew the line."""
        return [*super().get_line_filters(), StripControls()]

    def _theme_name(self, dark: bool) -> str:
        return f"workbench-{'ansi-' if self._ansi else ''}{'dark' if dark else 'light'}"

    async def on_event(self, event: events.Event) -> None:
        """Keys typed before the first frame wait for it: nothing has the focus yet that could take them."""
        if self._early is not None and isinstance(event, events.Key):
            self._early.append(event)
        else:
            await super().on_event(event)

    def on_ready(self) -> None:
        """The first frame is painted: collect garbage again, but not in what was imported."""
        gc.freeze()
        gc.enable()
        self._use_keys()
        # Behind what the screen has yet to do: on a busy machine it may not have given the focus to its form by now.
        self.screen.call_later(self._take_early)
        if self._runs_first:
            self.action_runs()

    async def _take_early(self, tries: int = 50) -> None:
        """Hand on the keys that waited, one by one; those typed meanwhile stand behind them."""
        if self.screen.focused is None and tries:  # a screen without anything to focus has them after a second
            self.set_timer(0.02, lambda: self._take_early(tries - 1))
            return
        while self._early:
            await super().on_event(self._early.pop(0))
        self._early = None

    def _use_keys(self) -> None:
        """The person's own keys, from keys.json in the config folder."""
        from platformdirs import user_config_path

        mine, problem = keymap(user_config_path("workbench") / "keys.json")
        if mine:
            self.set_keymap(dict(mine))
        if problem:
            self.notify(visible(redact(problem)), severity="warning", markup=False)

    def on_resize(self, event: events.Resize) -> None:
        """Too little room: a sentence stands over whatever is open, and goes when there is room."""
        small = event.size.width < LEAST[0] or event.size.height < LEAST[1]
        if small != isinstance(self.screen, TooSmall):
            if small:
                self.push_screen(TooSmall())
            else:
                self.pop_screen()

    def on_mount(self) -> None:
        """Signals end the app through its own door, so that the terminal is given back."""
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)

    def on_unmount(self) -> None:
        """Nothing that was started here stays behind."""
        if self._inspector is not None:
            self._inspector.close()

    def _on_signal(self, number: signal.Signals) -> None:
        code = 128 + number
        self.left = True
        self._keep_draft()
        end = threading.Timer(LEAVE_SECONDS, os._exit, (code,))
        end.daemon = True
        end.start()
        self.exit(return_code=code)

    def _fatal_error(self) -> None:
        """An error of ours: details without local variables into a file, one sentence to the person."""
        problem = self._exception
        place = _state_folder() / "app.log"
        text = "".join(traceback.format_exception(problem)) if problem else "unknown error\n"
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{visible(redact(text), lines=True)}\n")
            where = f" The details are in {place}."
        except OSError:
            where = ""
        kept = self._keep_draft()
        name = type(problem).__name__ if problem else "an error"
        words = f"The app stopped on {name}: {str(problem)[:300]}.{where}{' ' + kept if kept else ''}"
        self._exit_renderables.append(Segments([Segment(visible(redact(words))), Segment.line()]))
        self._close_messages_no_wait()

    def _keep_draft(self) -> str:
        """Write an unsaved draft beside the app's log, to be offered at the next start; the sentence says where."""
        draft = self.__dict__.get("draft")
        if draft is None or not draft.dirty:
            return ""
        try:
            entry = self.unsaved.entry(draft)
            place = self.unsaved.as_file(draft.text())
            self.unsaved.write(entry, file=place)
        except OSError as problem:
            return f"The unsaved config could not be kept: {problem.strerror}."
        sentence = f"The unsaved config is in {place}; `workbench {place}` opens it."
        self.goodbye.append(sentence)
        return sentence

    # Actions that work everywhere

    def action_help(self) -> None:
        """Keys of this screen."""
        from workbench.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(getattr(self.screen, "NAME", "")))

    def action_shade(self) -> None:
        """Light or dark."""
        self.theme = self._theme_name(not self.current_theme.dark)

    def action_runs(self) -> None:
        """The list of runs."""
        from workbench.screens.runs import RunsScreen

        if not isinstance(self.screen, RunsScreen):
            self.push_screen(RunsScreen(self.runs_dir))

    def action_build(self) -> None:
        """The seven steps; back to them if they are open."""
        from workbench.screens.build import BuildScreen

        if any(isinstance(screen, BuildScreen) for screen in self.screen_stack):
            while not isinstance(self.screen, BuildScreen):
                self.pop_screen()
        else:
            self.push_screen(BuildScreen())

    def action_interrupt(self) -> None:
        """Ctrl+C asks to quit; twice is not needed."""
        self.action_leave_all()

    def action_leave(self) -> None:
        """Back; on the last screen, quit."""
        if len(self.screen_stack) > 1:
            self.pop_screen()
        else:
            self.action_leave_all()

    def action_leave_all(self) -> None:
        """Quit; asks only when something would be lost."""
        from workbench.screens.leave import LeaveScreen

        if isinstance(self.screen, LeaveScreen):
            self.leave_now()
        elif "draft" in self.__dict__ and self.draft.dirty:
            self.push_screen(LeaveScreen(self.draft), self._answered)
        else:
            self.leave_now()

    def _answered(self, answer: str | None) -> None:
        if answer == "leave":
            self.leave_now()

    def leave_now(self) -> None:
        """Quit, and say what goes on without this window."""
        from workbench.screens.leave import what_goes_on

        self.left = True
        self.unsaved.give_up()
        self.goodbye += what_goes_on(self.runs_dir)
        self.exit()


def _state_folder() -> Path:
    from platformdirs import user_state_path

    return user_state_path("workbench")
