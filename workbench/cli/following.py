"""Following a run in plain text: what `train`, `watch` and `demo` print while it goes.

On a terminal one line is rewritten in place; elsewhere a line comes now and then. Everything that is not a result goes
to stderr. Nothing here can touch the run: leaving is always harmless.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from engine import figures
from engine.errors import visible
from engine.run import launch, silence
from engine.run.best import best_text
from engine.run.curves import concern, told_by
from engine.run.ending import end_of, facts, ways
from engine.run.index import Watch
from engine.run.proposals import FIRST
from engine.run.view import RunView
from workbench.calling import run_name
from workbench.cli.output import as_called, clear, echo, rewrite, styled
from workbench.panels.glyphs import style_of

LOOK_SECONDS = 0.2
# Without a terminal: a line at least so often, so that a CI log shows life.
SAY_SECONDS = 10.0

COLOURS = {
    "running": "green",
    "finished": "green",
    "stopped": "yellow",
    "stopping": "yellow",
    "failed": "red",
    "lost": "red",
}


def state_text(state: str) -> str:
    """A sign and a word: a state must look different everywhere, also without colour."""
    return f"{style_of(state).glyph} {state}"


def reap() -> None:
    """Takes note of processes that ended after their parents had: those are the children of a container's first process, and
    would stay in its table as zombies."""
    if os.getpid() == 1:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


class Follower:
    """Prints what is new in a run's view, each thing once."""

    def __init__(self, watch: Watch, *, quiet: bool = False, after: int = -1) -> None:
        self.watch = watch
        self.quiet = quiet
        self._after = after
        """The newest segment of before a resume: its phases are no news."""
        self.live = sys.stderr.isatty() and not quiet
        self._phase = ""
        self._samples = 0
        self._checkpoints: set[tuple[Any, Any]] = set()
        self._uploads: set[tuple[Any, Any]] = set()
        self._diverged = self._restarts = 0
        self._slowest: set[tuple[int, str]] = set()
        self._concerns: set[str] = set()
        self._state = ""
        self._said_at = 0.0
        self._said_step = -1
        self._line = self._silent = False
        self._waits: str | None = None
        self._know(watch.view)

    def _know(self, view: RunView) -> None:
        """What is there already is no news."""
        self._phase, self._state = view.phase, view.state
        self._samples, self._diverged, self._restarts = len(view.samples), len(view.diverged), len(view.restarts)
        self._checkpoints = {(entry["step"], entry["state"]) for entry in view.checkpoints}
        self._uploads = {(entry["step"], entry["state"]) for entry in view.uploads}

    def until(self, done: Callable[[RunView], bool]) -> RunView:
        """Follow until `done` says so or the run is over and its processes are gone; returns the view."""
        gc.enable()  # off since the command started, and this may go on for days
        while True:
            reap()
            self.watch.poll()
            view = self.watch.view
            self._news(view)
            if view.over:
                # What comes next may be another run on the same card, or a look at what this one left. And a worker that
                # died may be started anew.
                launch.settle(self.watch.folder)
                self.watch.poll()
                view = self.watch.view
                self._news(view)
            if view.over or done(view):
                self._clear()
                return view
            time.sleep(LOOK_SECONDS)

    def print(self, text: str, **style: Any) -> None:
        if not self.quiet:
            self._clear()
            echo(styled(text, **style), err=True)

    def _news(self, view: RunView) -> None:
        if view.phase and view.phase != self._phase and view.segment > self._after:
            self._phase = view.phase
            self.print(view.phase)
        if view.state != self._state and view.state in ("starting", "stopping"):
            self.print(state_text(view.state), fg=COLOURS.get(view.state))
        self._state = view.state
        if view.state == "queued" and view.cause != self._waits:
            self._waits = view.cause
            self.print(f"{state_text('queued')}: {view.cause}" if view.cause else state_text("queued"))
        for entry in view.checkpoints:
            key = (entry["step"], entry["state"])
            if key not in self._checkpoints:
                self._checkpoints.add(key)
                if entry["state"] == "committed":
                    size = f" ({figures.size(entry['bytes'])})" if entry["bytes"] is not None else ""
                    best = ", the best so far" if view.best and view.best["step"] == entry["step"] else ""
                    self.print(f"checkpoint at step {entry['step']}{size}{best}")
        for entry in view.uploads:
            key = (entry["step"], entry["state"])
            if key not in self._uploads:
                self._uploads.add(key)
                if entry["state"] == "arrived":
                    self.print(f"checkpoint-{entry['step']} is at {visible(entry['url'])}")
                elif entry["state"] in ("retry", "failed"):
                    words = "has not arrived yet" if entry["state"] == "retry" else "was not sent"
                    self.print(f"! checkpoint-{entry['step']} {words}: {visible(entry['message'])}", fg="yellow")
        for entry in view.diverged[self._diverged :]:
            self.print(f"step {entry['step']}: {entry['what']} is no longer a finite number", fg="red")
        self._diverged = len(view.diverged)
        for entry in view.restarts[self._restarts :]:
            self.print(f"! {entry['message']}", fg="yellow")
        self._restarts = len(view.restarts)
        if view.slowest is not None and not view.over and view.slowest[:2] not in self._slowest:
            self._slowest.add(view.slowest[:2])
            self.print(f"! {view.slowest_text}", fg="yellow")
        if not view.over and (words := concern(view.method, view.series)) and words not in self._concerns:
            self._concerns.add(words)
            self.print(f"! {words}", fg="yellow")
        if view.silent_seconds is not None and not self._silent:
            self.print(silence.advice(view.id, view.silent_seconds), fg="yellow")
        self._silent = view.silent_seconds is not None
        for sample in view.samples[self._samples :]:
            prompt, answer = (visible(sample[key])[:70] for key in ("prompt", "completion"))
            self.print(f"step {sample['step']:>5}  {prompt} → {answer}")
        self._samples = len(view.samples)
        self._status(view)

    def _status(self, view: RunView) -> None:
        if self.quiet:
            return
        if self.live:
            text = status_line(view)
            if text:
                rewrite(text)
                self._line = True
            return
        now = time.monotonic()
        text = status_line(view)
        # What stands there from before a resume is no news, and its phases until it trains are said already.
        told = view.segment > self._after and view.state != "starting"
        if told and view.step and text and view.step != self._said_step and now - self._said_at >= SAY_SECONDS:
            self._said_at, self._said_step = now, view.step
            echo(text, err=True)

    def _clear(self) -> None:
        if self._line:
            clear()
            self._line = False


def status_line(view: RunView) -> str:
    """`step 412 of 620 (66 %)  loss 0.0312  9,812 tokens/s  0:42 left`."""
    if view.state == "starting" or (not view.step and not view.latest):
        progress = view.progress
        if progress and progress["what"]:
            counted = progress["unit"] not in ("bytes", "seconds") and (progress["done"] or progress["total"])
            doing = figures.doing(progress) + (f" {progress['unit']}" if counted else "")
        else:
            doing = view.phase
        return "  ".join(part for part in (doing, silence.describe(view.silent_seconds)) if part)
    parts = [f"step {view.step}"]
    if view.max_steps:
        parts[0] += f" of {view.max_steps} ({100 * view.step / view.max_steps:.0f} %)"
    of_steps, held_out = told_by(view.latest)
    if of_steps in view.latest:
        parts.append(f"{of_steps} {view.latest[of_steps]:z.4f}")
    if held_out in view.latest:
        parts.append(f"held-out {view.latest[held_out]:z.4f}")
    speed = view.latest.get("tokens_per_second")
    if speed:
        parts.append(f"{speed:,.0f} tokens/s")
    if view.progress and not view.over:
        parts.append(figures.doing(view.progress))
    if view.silent_seconds is not None:
        parts.append(silence.describe(view.silent_seconds))
    elif (left := view.seconds_left()) is not None and not view.over:
        parts.append(f"{figures.duration(left)} left")
    return "  ".join(parts)


def ending(view: RunView, name: str) -> str:
    """How it ended, in one sentence, with the way on; `name` is what the run is called in a command."""
    took = figures.duration(view.seconds) if view.seconds else ""
    if view.state == "finished":
        name = told_by(view.latest)[0]
        value = f", {name} {view.latest[name]:z.4f}" if name in view.latest else ""
        whole = f"{state_text('finished')}: {view.id}, {view.step} step{'s' if view.step != 1 else ''}{value}" + (
            f", {took}" if took else ""
        )
        return ". ".join(part for part in (whole, view.cause, best_text(view)) if part)
    if view.state == "stopped":
        return f"{state_text('stopped')} at step {view.step}: {view.id}. `workbench resume {name}` goes on."
    return f"{state_text(view.state)} at step {view.step}: {view.id}. {view.cause}"


def report(watch: Watch) -> None:
    """The end on stderr: what a finished run leaves, the lines that matter when it failed."""
    view, name = watch.view, run_name(watch.folder)
    echo(styled(ending(view, name), fg=COLOURS.get(view.state)), err=True, hang=2)
    for what, words in facts(view, watch.folder):
        echo(f"  {what:<13}  {words}", err=True)
    for way in ways(view, watch.folder, name):
        echo(f"  {way.title:<13}  {as_called(way.command, err=True)}", err=True)
    if view.state == "failed":
        for line in view.cause_lines[-12:]:
            echo("  " + line, err=True)
        _propose(view, watch, name)


def _propose(view: RunView, watch: Watch, name: str) -> None:
    """The change to make after a failure with the command that makes it; else how to go on, and what comes first."""
    end = end_of(view, watch.folder, name)
    for what, words in end.facts:
        echo(f"  {what:<13}  {words}", err=True)
    if end.change is not None:
        echo(f"  {'proposed':<13}  {end.change.summary}: {end.change.why}", err=True, hang=17)
        echo(f"`workbench resume {name} --fix` would {end.way_on}.", err=True)
    elif view.committed:
        first = f"First {FIRST}: then " if end.blocked else ""
        echo(f"{first}`workbench resume {name}` goes on from step {view.committed[-1]}.", err=True)


def summary(watch: Watch) -> dict[str, Any]:
    """A run as `runs --json` lists it."""
    view = watch.view
    loss = view.latest.get("loss")
    ended = watch.details.get("ended") if view.over else None
    return {
        "id": view.id,
        "state": view.state,
        "method": view.method,
        "model": view.model,
        "step": view.step,
        "max_steps": view.max_steps,
        "loss": loss,
        "reward": view.latest.get("reward"),
        "best": view.best,
        "started": view.started or watch.details.get("created"),
        "ended": view.ended or ended,
        "cause": view.cause or None,
        "cause_kind": view.cause_kind or None,
        "diverged_at": view.diverged_at,
        "restarts": len(view.restarts),
        "silent_seconds": view.silent_seconds,
    }


def exit_code(view: RunView) -> int:
    """0 for a run that finished or was stopped on request, 1 for one that failed or is lost."""
    return 0 if view.state in ("finished", "stopped") else 1
