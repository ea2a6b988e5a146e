"""`Compare(run, run)`: two to eight runs laid beside each other, also runs that go on: curves, settings, answers.

The curves come as a monitor's do, run by run; what differs is told here, and travels only when it changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from engine.config.files import load
from engine.config.findings import shown as value_shown
from engine.errors import UsageError, WorkbenchError, visible
from engine.run import store
from engine.run.compare import MOST, describe_identical, fit_to_compare, format_value, summary, unique_names
from engine.run.curves import label_of
from engine.run.store import RunFolder
from engine.run.view import RunView
from widgets.curves import MOST as MOST_CURVES
from widgets.curves import drawn
from widgets.monitor import monitoring
from widgets.protocol import NotebookWidget, Part, bundle, news, shown, style, verb
from widgets.reader import Runs
from widgets.run_actions import Run

PROMPTS = 16


class ComparePart(Part):
    """Answers what differs between runs that a view knows by name."""

    def __init__(self, known: Runs, given: Sequence[str] = ()) -> None:
        self._known = known
        self._given = tuple(given)
        self._configs: dict[str, tuple[tuple[int, int], Mapping[str, Any]]] = {}

    @verb
    def compared(self) -> dict[str, Any]:
        return {"runs": list(self._given)}

    @verb
    def compare(
        self, *, runs: Annotated[list[Run], Field(min_length=2, max_length=MOST)], mark: int = 0
    ) -> dict[str, Any]:
        """What differs between these runs now, in words; nothing but its mark where the asker has it already."""
        if len(set(runs)) < len(runs):
            raise UsageError("A run was named twice; name runs that are different.")
        return news(_for_view(*self._compare(runs)), mark)

    def data(self) -> dict[str, Any]:
        """All that differs between the given runs as plain values, every curve and answer of theirs among it.

        Raises WorkbenchError where a config cannot be read. Of long runs all is read first, which may take seconds.
        """
        for run in self._given:
            self._known.read_completely(run)
        comparison, problem = self._compare(self._given)
        if problem:
            raise WorkbenchError(problem)
        return comparison

    def _compare(self, runs: Sequence[str]) -> tuple[dict[str, Any], str]:
        """The comparison of the runs, and why their settings could not be compared, if so."""
        configs, problem = [], ""
        try:
            configs = [self._config(run) for run in runs]
        except (WorkbenchError, OSError) as trouble:
            problem = str(trouble)

        def compare_views(views: list[RunView]) -> dict[str, Any]:
            return summary(runs, views, configs)

        return self._known.seen_together(runs, compare_views), problem

    def _config(self, run: str) -> Mapping[str, Any]:
        """A run's config, read again only where the file has changed."""
        path = self._known.folder(run).config
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        if run not in self._configs or self._configs[run][0] != stamp:
            self._configs[run] = (stamp, load(path).mapping)
        return self._configs[run][1]

    def summary(self) -> str:
        """What differs in a few lines, for a notebook that cannot show widgets."""
        if not self._given:
            return ""
        comparison, problem = self._compare(self._given)
        lines = [f"Runs {', '.join(visible(run) for run in self._given)}"]
        for name, ends in list(comparison["curves"].items())[:3]:
            newest = [value_shown(end["last"]) if end and end["last"] is not None else "-" for end in ends]
            lines.append(f"  {visible(label_of(name).title)}: {', '.join(newest)}")
        lines += [f"  {visible(path)}: {', '.join(values)}" for path, values in _settings(comparison)]
        lines += [f"  {sentence}" for sentence in describe_identical(comparison["identical"])]
        lines += [f"  {visible(problem)}"] if problem else []
        return "\n".join([*lines, f"  In a terminal: workbench compare {' '.join(map(visible, self._given))}"])


def _settings(comparison: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    return [(row["path"], [format_value(value) for value in row["values"]]) for row in comparison["settings"]]


def _for_view(comparison: Mapping[str, Any], problem: str) -> dict[str, Any]:
    """As a view shows it: clipped, without secrets, hidden characters visible."""
    curves = drawn(comparison["curves"])[:MOST_CURVES]
    return {
        "curves": [
            {"name": name, "title": title, "unit": unit, "ends": comparison["curves"][name]}
            for name, title, unit in curves
        ],
        "settings": [
            {"path": shown(path, 120), "values": [shown(value, 300) for value in values]}
            for path, values in _settings(comparison)
        ],
        "identical": [shown(sentence, 400) for sentence in describe_identical(comparison["identical"])],
        "problem": shown(problem, 400),
        "answers": [
            {"prompt": shown(asked["prompt"], 300), "answers": [_answer(answer) for answer in asked["answers"]]}
            for asked in comparison["answers"][:PROMPTS]
        ],
    }


def _answer(answer: Mapping[str, Any] | None) -> list[Any] | None:
    return None if answer is None else [answer["step"], shown(answer["text"], 400)]


class Compare(NotebookWidget):
    """Two to eight runs side by side: by their names, their folders, or as RunFolders. They may still be going."""

    _esm = bundle("compare", entry="compareFace")
    _css = style()

    def __init__(self, *names: str | Path | RunFolder, runs: str | Path | None = None, height: int = 480) -> None:
        fit_to_compare([str(name.path if isinstance(name, RunFolder) else name) for name in names])
        root = store.runs_dir(runs)
        self.runs = [name if isinstance(name, RunFolder) else store.find(str(name), root) for name in names]
        called = unique_names(self.runs)
        known = Runs(lambda: root, dict(zip(called, self.runs, strict=True)))
        self._part = ComparePart(known, called)
        super().__init__(*monitoring(known), self._part, height=height)

    @property
    def found(self) -> dict[str, Any]:
        """What `workbench compare --json` prints: `runs`, `curves`, `settings` and `answers`, a value for each run."""
        return self._part.data()

    def __repr__(self) -> str:
        return self._part.summary()
