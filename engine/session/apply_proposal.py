"""Applying what a run that failed proposes: it goes on from its checkpoint, or a new run starts that says where it comes from."""

from __future__ import annotations

from engine.config.files import absolute, parse
from engine.data.gather_facts import gather_facts
from engine.errors import WorkbenchError
from engine.planning.estimate import estimate
from engine.rules import read
from engine.run.ending import End
from engine.run.from_config import launch_config
from engine.run.store import RunFolder
from engine.run.view import RunView
from engine.session.resume import Progress, changed_config, resume


def apply(
    run: RunFolder, view: RunView, end: End, *, accept_data: bool = False, on_progress: Progress | None = None
) -> RunFolder:
    """Launch what `end` proposes for a run that failed; the run that works now, this one or a new one.

    Raises WorkbenchError where nothing is proposed or it cannot start, and DataChanged as `resume` does.
    """
    if end.change is None:
        raise WorkbenchError(
            f"{run.id}: no change is known that would mend this.", "Change its config, then train that."
        )
    if end.anew:
        how = "diverged" if view.cause_kind == "diverged" else "failed"
        return start_anew(
            run, end.change.settings, f"{run.id}, which {how} at step {view.step:,}: {end.change.summary}"
        )
    resume(run, settings=end.change.settings, accept_data=accept_data, on_progress=on_progress)
    return run


def start_anew(run: RunFolder, settings: dict[str, object], origin: str) -> RunFolder:
    """A new run beside this one, of its config with other values, from the start; `origin` says where it comes from."""
    mapping = absolute(parse(changed_config(run, settings)).mapping, run.path)
    facts = gather_facts(read(mapping).config, run.path)
    config = read(mapping, facts).accepted("No run was started.")
    info = run.read_json()
    return launch_config(
        config,
        facts,
        runs_dir=run.path.parent,
        name=str(info.get("name") or "") or None,
        forecast_bytes=estimate(config, facts).checkpoints_bytes,
        source=info.get("source"),
        origin=origin,
    )
