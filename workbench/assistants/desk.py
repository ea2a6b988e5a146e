"""One server's work: what each tool answers, from the cores of the commands. No word of `mcp` here.

Each function here is the work of one tool on a thread; `job` asks the inspector and says how far it is. What may be reached is
judged first, by `roots`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.bridge.detect import detect
from engine.config.files import Document, load
from engine.data.gather_facts import outcome
from engine.errors import ConfigUnreadable, UsageError, as_argument, redact
from engine.facts.counts import longest_row
from engine.run import launch, store
from engine.run.ending import end_of
from engine.run.index import Watch, open_view, peek
from engine.run.store import RunFolder
from engine.session.explain import names
from engine.session.rows import image_text, length_text, reward_text, tokens_of, why_none
from workbench.assistants import answers
from workbench.assistants.jobs import Job, Jobs
from workbench.assistants.roots import MOST_CONFIGS, Roots
from workbench.cli.check import judge
from workbench.cli.estimate import foresee, lines
from workbench.cli.explain import explained
from workbench.cli.findings import line_of
from workbench.cli.following import ending, status_line, summary
from workbench.cli.reading import load_own, read_with, with_overrides
from workbench.cli.stop import stop
from workbench.cli.train import Start, plan_start

MOST_TEXT = 60_000
"""Characters of rows in one answer."""
MOST_RUNS = 50
CURVE_POINTS = 100


@dataclass
class Desk:
    """What a server holds: where it looks, its work under way, and whether it may start and stop runs where nobody can be asked."""

    roots: Roots
    runs: str | None
    """The folder of runs, where the person named it."""
    allow_launch: bool = False
    jobs: Jobs = field(default_factory=Jobs)
    asked: dict[str, str] = field(default_factory=dict)
    """What a person was asked, by what it was about: the same question has the same words."""

    # -- configs -------------------------------------------------------------------------------------------------------
    def config(
        self, file: str, settings: Sequence[str], read: Callable[[Path], Document] = load
    ) -> tuple[Path, tuple[str, ...], Document]:
        """A config that may be read, with these settings beside it. Raises UsageError, ConfigUnreadable."""
        path = self.roots.config_file(file)
        document, pairs = read(path), tuple(settings)
        base = path.resolve().parent
        for given in ((), pairs) if pairs else ((),):
            self.roots.judge(with_overrides(document.mapping, base, given), base)
        return path, pairs, document

    def configs(self, job: Job) -> answers.Configs:
        """The config files below the roots."""
        found = self.roots.configs()
        return answers.Configs(
            roots=[str(root) for root in self.roots.folders],
            configs=[_config_file(path) for path in found],
            more=len(found) == MOST_CONFIGS,
        )

    def read_config(self, job: Job, file: str) -> answers.ConfigText:
        """A config as it stands in its file."""
        document = load(self.roots.config_file(file))
        return answers.ConfigText(file=file, text=document.text(), tool=detect(document.mapping))

    def check(self, job: Job, file: str, settings: Sequence[str], machine: str | None, data: bool) -> answers.Checked:
        """What `workbench check` says."""
        path, pairs, _ = self.config(file, settings)
        judged = judge(path, pairs, machine, ask=job.ask if data else None)
        document = judged.as_json()
        found = [_found(each, judged.lines) for each in document["findings"]]
        return answers.Checked(
            ok=judged.ok,
            summary=judged.summary,
            findings=found,
            data=document["data"],
            changes=document.get("changes"),
            tool=judged.tool,
        )

    def preview(
        self,
        job: Job,
        file: str,
        settings: Sequence[str],
        wanted: dict[str, Any],
        count: int,
        held_out: bool,
        ids: bool,
    ) -> answers.Previewed:
        """What `workbench preview` shows."""
        path, pairs, document = self.config(file, settings, load_own)
        mapping, _ = read_with(document, pairs)
        split = "eval" if held_out else "train"
        answer = job.ask(
            "preview", config=mapping, base=str(path.resolve().parent), split=split, rows=wanted, count=count
        )
        return _previewed(answer, wanted, ids)

    def estimate(self, job: Job, file: str, settings: Sequence[str], machine: str | None) -> answers.Estimated:
        """What `workbench estimate` says."""
        path, pairs, _ = self.config(file, settings)
        known = foresee(path, pairs, machine, ask=job.ask)
        figures = known.as_json()
        found = [_found(each, {}) for each in figures.pop("findings")]
        said = lines(known.estimated, known.facts, longest_row(known.config, known.facts))
        return answers.Estimated(lines=_lines(said), figures=figures, findings=found, problem=known.problem)

    def explain(self, job: Job, name: str | None) -> answers.Explained:
        """What `workbench explain` says."""
        if name is None:
            return answers.Explained(text="", names=names())
        return answers.Explained(text=explained(name).as_text(), names=None)

    # -- a run's start and end -----------------------------------------------------------------------------------------
    def plan(self, job: Job, file: str, settings: Sequence[str]) -> Start:
        """The run that a config describes, as `workbench train` would start it. Raises ConfigRefused, UsageError."""
        path, pairs, document = self.config(file, settings, load_own)
        base = path.resolve().parent
        plan = plan_start(document.mapping, base, pairs, self.runs, name=path.stem, source=path.absolute())
        self.roots.require(plan.place, "run.output_dir" if self.runs is None else "--runs")
        return plan

    def stop(self, job: Job, run: str, do: str, now: bool) -> answers.Stopped:
        """Ask a run to stop, and wait for its end."""
        folder = self.roots.run(run)
        job.say("asked; it ends after its step")
        _, kept = stop(folder, do, now=now, by="an assistant", quiet=True, leave=lambda: job.cancelled)
        return answers.Stopped(run=_state(peek(folder)), checkpoint=str(kept) if kept else None)

    # -- runs ----------------------------------------------------------------------------------------------------------
    def list_runs(self, job: Job) -> answers.Runs:
        """The runs of the folder, the newest first."""
        runs = self.runs_here()
        shown = [_state(peek(run, problem=launch.attend_or_report(run))) for run in runs[:MOST_RUNS]]
        return answers.Runs(folder=str(self.roots.runs), runs=shown, more=max(0, len(runs) - MOST_RUNS))

    def watch(self, job: Job, run: str, seconds: float, step: int | None) -> answers.Watched:
        """Follow a run to its end, to a step, or for so long."""
        folder = self.roots.run(run)
        problem = launch.attend_or_report(folder)
        with open_view(folder, problem=problem) as watch:
            looks = math.ceil(seconds / 0.25)
            while True:
                watch.poll()
                view = watch.view
                if view.over:
                    launch.settle(folder)
                    watch.poll()
                job.say(f"{view.state}: {status_line(view)}", view.step, view.max_steps)
                if view.over or looks <= 0 or (step is not None and view.step >= step):
                    return answers.Watched(run=_state(watch), over=view.over)
                looks -= 1
                job.wait()

    def log(self, run: str, count: int, rank: int = 0) -> answers.Log:
        """The last lines of a run's log."""
        folder = self.roots.run(run)
        return answers.Log(id=folder.id, lines=peek(folder).log(count, rank))

    def receipt(self, run: str) -> answers.Receipt:
        """What was really done in a run."""
        view = peek(self.roots.run(run)).view
        return answers.Receipt(id=view.id, state=view.state, entries=view.receipt)

    def events(self, run: str) -> dict[str, Any]:
        """A run as its events tell it: the folded view, each curve with few points."""
        with open_view(self.roots.run(run)) as watch:
            watch.read_completely()
            return {"note": answers.DATA, **_state(watch).model_dump(), **watch.view.as_json(points=CURVE_POINTS)}

    def config_of(self, run: str) -> str:
        """The text of a run's own config."""
        return self.roots.run(run).read_config()

    def post_mortem(self, run: str) -> answers.PostMortem:
        """How a run ended, and what to do next. Raises UsageError for one that goes on."""
        folder = self.roots.run(run)
        with open_view(folder, problem=launch.attend_or_report(folder)) as watch:
            watch.read_completely()
            view, name = watch.view, as_argument(folder.path)
            if not view.over:
                raise UsageError(f"{folder.id} is {view.state}; what it leaves is known once it has ended.")
            end = end_of(view, folder, name)
            change = f"{end.change.summary}: {end.change.why}" if end.change is not None else None
            ways = [answers.Way(title=way.title, means=way.means, command=way.command) for way in end.ways]
            if view.state != "finished" and not end.blocked and (view.committed or change):
                command = f"workbench resume {name}{' --fix' if change else ''}"
                ways.append(
                    answers.Way(title="go on", means=end.way_on or "from its newest checkpoint", command=command)
                )
            return answers.PostMortem(
                id=folder.id,
                state=view.state,
                ending=ending(view, name),
                facts=_lines(end.facts),
                log=view.cause_lines,
                change=change,
                ways=ways,
            )

    def runs_here(self) -> list[RunFolder]:
        """The runs of the folder, the newest first."""
        runs = [folder for folder in store.runs_in(self.roots.runs) if self.roots.holds(folder.path)]
        return sorted(runs, key=lambda run: -_created(run))

    def state(self, folder: RunFolder) -> answers.RunState:
        """Where a run stands now."""
        return _state(peek(folder))

    def close(self) -> None:
        """End all work."""
        self.jobs.close()


def _config_file(path: Path) -> answers.ConfigFile:
    try:
        return answers.ConfigFile(file=str(path), tool=detect(load(path).mapping))
    except (ConfigUnreadable, OSError) as problem:
        return answers.ConfigFile(file=str(path), tool=None, problem=str(problem))


def _found(finding: Mapping[str, Any], places: Mapping[str, int | None]) -> answers.Found:
    return answers.Found(**{**finding, "line": line_of(finding["path"], places)})


def _lines(pairs: Sequence[tuple[str, str]]) -> list[answers.Line]:
    return [answers.Line(label=label, value=value) for label, value in pairs]


def _state(watch: Watch) -> answers.RunState:
    known = summary(watch)
    return answers.RunState(**known, path=str(watch.folder.path), status=status_line(watch.view))


def _created(run: RunFolder) -> float:
    created = run.read_json().get("created")
    return float(created) if isinstance(created, int | float) else 0.0


def _previewed(answer: Mapping[str, Any], wanted: Mapping[str, Any], ids: bool) -> answers.Previewed:
    room = MOST_TEXT
    rows = []
    for row in answer["rows"]:
        shown, used = _row(row, ids, room)
        rows.append(shown)
        room = max(0, room - used)
    sources = [f"{source['path']}: {source['why']}" for source in answer.get("sources", [])]
    return answers.Previewed(
        method=answer["method"],
        template=answer.get("template"),
        fingerprint=answer["fingerprint"],
        total=answer.get("total"),
        sources=sources,
        warnings=[redact(each) for each in answer.get("warnings", [])],
        rows=rows,
        why_none="" if rows else why_none(wanted),
    )


def _row(row: Mapping[str, Any], ids: bool, room: int) -> tuple[answers.Row, int]:
    """A row of the inspector's in stretches, in so many characters; how many it took."""
    parts: dict[str, list[answers.Stretch]] = {}
    used, cut = 0, False
    for name, tokens in row["parts"].items():
        parts[name] = []
        for token in tokens:
            if used + len(token["text"]) > room:
                cut = True
                break
            used += len(token["text"])
            _add(parts[name], token, ids)
    error = row.get("error")
    answer = answers.Row(
        index=row["index"],
        length=length_text(row),
        learned=sum(bool(token["trained"]) for token in tokens_of(row)),
        truncated=row["truncated"],
        outcome=outcome(row),
        error=f"{redact(error)} The row begins: {row.get('clipped', '')[:500]}" if error else None,
        parts=parts,
        images=[image_text(image) for image in row["images"]],
        rewards=reward_text(row),
        cut_here=cut,
    )
    return answer, used


def _add(stretches: list[answers.Stretch], token: Mapping[str, Any], ids: bool) -> None:
    """Put one more token behind the others."""
    learned = bool(token["trained"])
    if not stretches or stretches[-1].learned is not learned:
        stretches.append(answers.Stretch(text="", learned=learned, tokens=0, ids=[] if ids else None))
    last = stretches[-1]
    last.text += token["text"]
    last.tokens += 1
    if last.ids is not None:
        last.ids.append(token["id"])
