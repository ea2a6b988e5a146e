"""Going on with a run whose config was changed: what this machine has no room for any more is told before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine import resume as resuming
from engine.config.files import absolute, parse
from engine.errors import UsageError, WorkbenchError, visible
from engine.resume import Progress, changed_config
from engine.run import launch, slurm
from engine.run.store import RunFolder


def resume(
    run: RunFolder,
    *,
    settings: Mapping[str, Any] | None = None,
    accept_data: bool = False,
    on_progress: Progress | None = None,
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """`engine.resume.resume`. Raises WorkbenchError, with the run left as it was, where it no longer fits."""
    refuse_what_no_longer_fits(run, settings or {})
    return resuming.resume(run, settings=settings, accept_data=accept_data, on_progress=on_progress)


def refuse_what_no_longer_fits(run: RunFolder, settings: Mapping[str, Any]) -> None:
    """Raises WorkbenchError where a changed config, one for fewer devices say, wants more memory than they have. A run whose
    config is as it was has been judged when it was launched, and one of SLURM's gets a machine that nobody sees from here."""
    if slurm.is_job(run) or not (settings or launch.changed_settings(run)):
        return
    from engine.data.gather_facts import look_at
    from engine.rules import read
    from engine.rules.fit import it_fits_into_memory

    try:
        text = changed_config(run, settings)
    except UsageError:
        return  # what is wrong with it is said where it is taken, behind what is wrong with the folder
    config = read(absolute(parse(text).mapping, run.path)).config
    for finding in it_fits_into_memory(config, look_at(config, run.path, sources=False)):
        if finding.severity == "error":
            raise WorkbenchError(
                f"run {visible(run.id)} cannot go on so: {finding.message}",
                "It stays as it is, with its checkpoints.",
            )
