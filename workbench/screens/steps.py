"""The seven steps between title and foot: the rail at the left, the form in the middle, explanation and consequences at right.

Owns where the person is: the step, the row last in focus on each, the level. What the draft becomes is the session's, which rows a
step has is said by `pages`, what stands at the right by `Side`. Every drawing is made anew from those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message

from engine.config.findings import RANK, Finding
from engine.config.steps import STEPS, step_of_path
from engine.config.tree import RunConfig, fields
from engine.errors import visible
from engine.session.build import step_statuses
from engine.session.explain import findable, first_sentence
from workbench.messages import FieldChosen
from workbench.panels.fields import findings_at
from workbench.panels.form import Form, FormPane
from workbench.panels.paint import clean
from workbench.panels.rail import Rail, Stop
from workbench.screens.background import Background
from workbench.screens.dialog import Item, Pick
from workbench.screens.editing import EditPane
from workbench.screens.pages import LEVELS, View, page
from workbench.screens.right_column import Side

_PLACES = {step.id: index for index, step in enumerate(STEPS)}


class Steps(Horizontal):
    """One step on screen, and the ways to the others."""

    class Moved(Message):
        """Another step is on screen."""

    def __init__(self, background: Background, step: str) -> None:
        super().__init__(id="body")
        self._background = background
        self._at = _PLACES[step]
        self._visited = {self._at}
        self._level = LEVELS[0]
        self._focus: dict[str, str] = {}
        self._drawn = ""
        """The step whose rows the form holds."""
        self.rail, self.pane, self.side = Rail(), EditPane(background.session), Side()

    def compose(self) -> ComposeResult:
        """The three columns."""
        yield self.rail
        yield self.pane
        yield self.side

    @property
    def step(self) -> str:
        """The id of the step on screen."""
        return STEPS[self._at].id

    @property
    def view(self) -> View:
        """All that a page may show, as it is now."""
        known, session = self._background, self._background.session
        return View(
            session,
            self._level,
            session.becomes,
            logout=known.logout,
            problem=known.problem,
            starting=known.starting,
            left=tuple(known.left),
        )

    # Drawing

    def draw(self, key: str | None = None) -> None:
        """Make everything from the draft; the cursor goes to the row of `key`."""
        self._remember()
        view = self.view
        self.pane.form.show(page(self.step, view), key or self._focus.get(self.step))
        self._drawn = self.step
        self.draw_typed()
        self.side.consequences.show(view.session.consequences)
        self._draw_side(view)

    @on(FormPane.Typed)
    def draw_typed(self) -> None:
        """Rail and note from what is being typed; nothing else here follows from it before it is kept."""
        found = self.pane.findings
        if self.pane.typed is not None:
            styles = {"error": "bad", "warning": "warn"}
            mine = [each for each in found if each.path == self.pane.editing]
            self.pane.note(tuple((visible(each.text), styles.get(each.severity, "hint")) for each in mine))
        done = self._visited - {self._at, len(STEPS) - 1}
        stops = tuple(
            Stop(each.id, each.title, now.worst or ("done" if index in done else "open"))
            for index, (each, now) in enumerate(zip(STEPS, step_statuses(found), strict=True))
        )
        totals = dict(Counter[str](each.severity for each in found))
        self.rail.show(stops, self._at, totals, self._background.session.uncounted)

    def _remember(self) -> None:
        """Which row is in focus; a key that moved the cursor just now may not have been heard of yet."""
        row = self.pane.form.row
        if self._drawn == self.step and row is not None and row.key:
            self._focus[self.step] = row.key

    def _draw_side(self, view: View) -> None:
        self._remember()
        if (self.pane.editing or "").endswith(".kind"):
            self.side.consequences.display = False  # the kind under the cursor of the open list is explained
        else:
            self.side.draw(self.pane.form.row, self.step, view)

    def nearest(self, findings: Sequence[Finding]) -> list[Finding]:
        """Those nearest to where the person is: of the row, else of the step, else all."""
        row = self.pane.form.row
        mine = findings_at(row.key, findings) if row is not None and row.key else []
        here = [finding for finding in findings if step_of_path(finding.path) == self.step]
        return mine or sorted(here or findings, key=lambda finding: RANK[finding.severity])

    # Moving

    def go(self, index: int, key: str | None = None) -> None:
        """To a step; the row in focus there is the one of last time."""
        if not 0 <= index < len(STEPS):
            return
        self.pane.close()
        self.side.aside = None
        self._visited |= {self._at, index}
        self._at = index
        self._drawn = ""
        self.pane.form.at = 0
        self.pane.form.top = 0
        self.draw(key)
        self.pane.form.focus()
        if wanted := key or self._focus.get(self.step):
            self.pane.form.go_to(wanted)
        self.post_message(self.Moved())

    def act(self, what: str) -> None:
        """One of the actions of the table, by its word, or to a step by its id."""
        if what in _PLACES:
            self.go(_PLACES[what])
            return
        {
            "back": lambda: self.go(self._at - 1),
            "on": lambda: self.go(self._at + 1),
            "form": self.to_form,
            "more": self._more,
            "find": self._find,
            "fix": lambda: self.pane.fix(self.nearest(self.pane.findings)),
            "findings": self._findings,
            "fold": lambda: self.screen.toggle_class("folded"),
        }[what]()

    def _more(self) -> None:
        """Basic, advanced, expert, basic."""
        self._level = LEVELS[(LEVELS.index(self._level) + 1) % len(LEVELS)]
        self.draw()

    def _find(self) -> None:
        """Go to a setting by words of its help, or explain a term, or a setting that has no row now."""
        config = self._background.session.draft.config

        def chosen(path: str | None) -> None:
            if path is None:
                return
            if not path.startswith("term:") and fields[path].applies(config):
                self.jump(path)
            else:
                self.side.aside = path
                self.draw()

        self.app.push_screen(Pick("Find a setting or a term", find_items(config), filtered=True), chosen)

    def _findings(self) -> None:
        """All findings: to the setting of one, or its fix, after which the others are listed again."""
        from workbench.screens.findings import FindingsScreen

        def chosen(answer: tuple[str, Finding] | None) -> None:
            if answer is None:
                return
            what, finding = answer
            if what == "fix":
                self.pane.apply(finding)
                self._findings()
            else:
                self.jump(finding.path)

        self.app.push_screen(FindingsScreen(self.pane.draft.findings), chosen)

    def jump(self, path: str) -> None:
        """To the row of a setting, raising the level if it is hidden."""
        step = step_of_path(path)
        for level in LEVELS[LEVELS.index(self._level) :]:
            self._level = level
            self.go(_PLACES[step], path)
            for key in (path, ".".join(path.split(".")[:2])):
                if self.pane.form.go_to(key):
                    self.draw(key)
                    return

    @on(FieldChosen)
    def _chosen(self) -> None:
        self.side.aside = None
        self._draw_side(self.view)

    @on(FormPane.Considered)
    def _considered(self, event: FormPane.Considered) -> None:
        """The kind under the cursor of the open list is explained before it is taken."""
        section, _, name = event.key.partition(".")
        if name == "kind" and self.pane.editing == event.key:
            self.side.consider(section, event.value)

    @on(Rail.Chosen)
    def _rail_chosen(self, event: Rail.Chosen) -> None:
        self.go(event.index)
        self.rail.focus()

    @on(Rail.Entered)
    def to_form(self) -> None:
        """The form gets the keys."""
        self.pane.form.focus()

    @on(Form.Left)
    def _to_rail(self) -> None:
        self.rail.focus()


def find_items(config: RunConfig) -> list[Item]:
    """One entry a setting or term; those of other methods and adapters say whose they are."""
    return [
        Item(
            item.path or f"term:{item.title}",
            Content.assemble(
                (item.title, "bold"), ("  " + "  ".join(filter(None, (item.path, item.whose))), "$wb-dim")
            ),
            Content.styled(clean(first_sentence(item.help).replace("`", "").rstrip(".")), "$wb-dim"),
            item.text,
        )
        for item in findable(config)
    ]
