"""Taking a run's model along: which forms, where to, and what became of each, compared with the trained model.

The work is done by `engine.export` in a process of its own; leaving the dialog cancels what is not done yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from engine.errors import WorkbenchError, redact, visible
from engine.export.llama_cpp import offered_quants
from engine.export.places import QUANTS, adapts_experts, forms_of, places, refuse_existing
from engine.export.process import Export, part_summary, request
from engine.figures import progress
from engine.run.store import RunFolder
from workbench.panels.glyphs import ascii_only
from workbench.panels.paint import clean, wrap
from workbench.panels.path_suggester import PathSuggester
from workbench.screens.dialog import Ask, Dialog

WIDTH = 56
"""Cells of a line in the dialog."""


class ExportNews(Message):
    """The export said something: `progress`, a `part` that is done, its `end`, or the `problem` it ended on."""

    def __init__(self, what: str, value: Any) -> None:
        super().__init__()
        self.what, self.value = what, value


class ExportScreen(Dialog[None]):
    """Forms to tick, the folder, and what was done."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "tick", show=False),
        Binding("x", "begin", show=False),
        Binding("o", "folder", show=False),
        Binding("f", "format", show=False),
        Binding("e", "per_expert", show=False),
    ]

    def __init__(self, run: RunFolder) -> None:
        super().__init__()
        self._run = run
        self._folder = Path.cwd() / f"{run.id}-export"
        self._ticked = {"safetensors"}
        self._quant = QUANTS[0]
        self._forms = forms_of(run)
        self._on_experts = adapts_experts(run)
        self._per_expert = False
        self._export: Export | None = None
        self._state = ""
        self._done: list[str] = []

    def compose(self) -> ComposeResult:
        """Title, forms, folder, what is going on, keys."""
        with Vertical(id="box"):
            yield Static(clean(f"Take the model of {self._run.id} along"), id="title", markup=False)
            yield OptionList(id="list", markup=False, compact=True)
            yield Static("", id="told", markup=False)
            yield Static("", classes="note", id="keys", markup=False)

    def on_mount(self) -> None:
        """The first form is ticked."""
        self._draw(0)
        self.query_one(OptionList).focus()

    def on_unmount(self) -> None:
        """What is not done goes with the dialog."""
        if self._export is not None:
            self._export.cancel()

    def _draw(self, at: int | None = None) -> None:
        view = self.query_one(OptionList)
        at = view.highlighted if at is None else at
        view.clear_options()
        on_, off = ("[x]", "[ ]") if ascii_only() else ("●", "○")
        for form, words in self._forms.items():
            name = f"{form} {self._quant}" if form == "gguf" else form
            if form == "adapter" and self._per_expert:
                name, words = (
                    "adapter, one for each expert",
                    "the adapter alone, for servers that ask for each expert's own",
                )
            room_is_needed = self._export is not None or self._done
            title = Content.assemble(
                (f"{on_ if form in self._ticked else off} {name}", "bold"),
                *([] if room_is_needed else [f"\n  {line}" for line in wrap(words, WIDTH)]),
            )
            view.add_option(Option(title, id=form))
        view.highlighted = at
        where = f"Into {visible(redact(str(self._folder)))}"
        self.query_one("#told", Static).update("\n".join([where, *self._done, self._state]).rstrip())
        per_expert = "   e per expert" if self._on_experts else ""
        keys = f"space tick   x export   f format{per_expert}   o folder   esc back"
        self.query_one("#keys", Static).update("esc cancels" if self._export is not None else keys)

    # Keys

    @on(OptionList.OptionSelected)
    def action_tick(self) -> None:
        """Take the form under the cursor along, or not."""
        at = self.query_one(OptionList).highlighted
        if at is not None and self._export is None:
            self._ticked ^= {list(self._forms)[at]}
            self._draw()

    def action_format(self) -> None:
        """The next number format of a GGUF."""
        if self._export is None:
            known = offered_quants(self._run)
            self._quant = known[(known.index(self._quant) + 1) % len(known)]
            self._draw()

    def action_per_expert(self) -> None:
        """The adapter of experts as one for each of them, or as PEFT keeps it."""
        if self._export is None and self._on_experts:
            self._per_expert = not self._per_expert
            self._draw()

    def action_folder(self) -> None:
        """Another folder."""

        def taken(path: str | None) -> None:
            if path and path.strip():
                self._folder = Path(path.strip()).expanduser().absolute()
                self._draw()

        if self._export is None:
            self.app.push_screen(Ask("Into which folder", str(self._folder), "", PathSuggester(Path.cwd())), taken)

    def action_begin(self) -> None:
        """Export what is ticked."""
        if self._export is not None:
            return
        self._done = []
        where = places(self._run, sorted(self._ticked), self._folder, self._quant)
        try:
            if not where:
                raise WorkbenchError("Nothing is ticked.")
            for place in where.values():
                refuse_existing(place)
        except WorkbenchError as problem:
            self._state = f"✗ {problem.message}"
            self._draw()
            return
        asked = request("export", self._run.path, places=where, quant=self._quant, per_expert=self._per_expert)
        export = self._export = Export(asked)
        self._state = "starting …"

        def post(message: dict[str, Any]) -> None:
            for what, value in message.items():
                self.post_message(ExportNews(what, value))

        def work() -> None:
            try:
                export.run(post)
                self.post_message(ExportNews("end", ""))
            except WorkbenchError as problem:
                self.post_message(ExportNews("end", f"✗ {problem.full_message}"))

        self.run_worker(work, thread=True, group="export", exit_on_error=True)
        self._draw()

    def action_nothing(self) -> None:
        """Cancel what is going on; else leave."""
        if self._export is not None:
            self._export.cancel()
        else:
            self.dismiss(None)

    def on_export_news(self, event: ExportNews) -> None:
        """Progress, a part, the end."""
        if event.what == "progress":
            state = event.value
            self._state = visible(state["what"]) + (f" {progress(state)}" if state["total"] > 1 else " …")
        elif event.what == "part":
            self._done.append(part_summary(event.value))
            self._state = ""
        elif event.what == "end":
            self._export, self._state = None, visible(event.value)
        self._draw()
