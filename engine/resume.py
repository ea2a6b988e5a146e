"""Resuming a run as a person asks for it: its rows are held to its record first, then it goes on.

What the commands, the app and the notebook call. Where every source is the file it was, nothing is prepared here; else the
inspector compares the prepared rows with the run's record, so that the run stays as it is while a person decides. The worker
compares once more, since a tokenizer may have changed too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.client import Inspector
from engine.errors import RunBusy, UsageError, visible
from engine.run import checkpoint, data_record, inside, launch
from engine.run.data_record import DataChanged
from engine.run.store import ENDED, RunFolder

Progress = Callable[[dict[str, Any]], None]


def resume(
    run: RunFolder,
    *,
    settings: Mapping[str, Any] | None = None,
    accept_data: bool = False,
    on_progress: Progress | None = None,
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Go on with a run that ended, as `launch.resume` does; with other values for some `settings`, by their dotted paths.

    Raises DataChanged, with the run left as it was, where its rows teach otherwise now and `accept_data` is not set, and
    WorkbenchError for settings that the rules refuse. Where it does not go on, config.yaml is as it was.
    """
    if settings:
        before = run.read_config()
        text = changed_config(run, settings)
        launch.settle(run)
        if launch.at_work(run):
            raise RunBusy(f"run {visible(run.id)} is still {run.state}.", "Stop it first, then change its settings.")
        inside.replace(run, run.config, text)
        try:
            return resume(run, accept_data=accept_data, on_progress=on_progress)
        except BaseException:
            if not launch.at_work(run):
                inside.replace(run, run.config, before)
            raise
    if accept_data:
        return launch.resume(run, accept_data=True)
    launch.settle(run)
    if run.state in ENDED and (changes := data_changes(run, on_progress)):
        raise DataChanged(run, changes)
    return launch.resume(run)


def changed_config(run: RunFolder, settings: Mapping[str, Any]) -> str:
    """The text of the run's config with these values in it, nothing written. Raises WorkbenchError with its first error."""
    from engine.config.edit import rewrite
    from engine.config.files import parse, put
    from engine.rules import read

    text = run.read_config()
    before = parse(text, path=run.config).mapping
    after = copy.deepcopy(before)
    for path, value in settings.items():
        put(after, path, value)
    for finding in read(after).findings:
        if finding.severity == "error":
            raise UsageError(f"run {visible(run.id)} cannot go on so: {finding.message}")
    return rewrite(text, before, after)


def data_changes(run: RunFolder, on_progress: Progress | None = None) -> list[str]:
    """Sentences on what the run's rows teach otherwise than when it was trained on them; none where they are the same.

    Raises the error of rows that cannot be prepared any more, and RecordDamaged.
    """
    record = data_record.read(run)
    if record is None or data_record.files_unchanged(record) or checkpoint.newest_valid(run, hashes=False)[0] is None:
        return []
    from engine.config.files import load

    with Inspector() as inspector:
        ticket = inspector.ask(
            "against",
            on_progress=on_progress,
            config=load(run.config).mapping,
            base=str(run.path),
            run=str(run.path),
            count=0,
        )
        try:
            changes = ticket.result()
        except BaseException:
            ticket.cancel()
            raise
    return [entry["sentence"] for entry in changes["splits"].values() if not entry["same"]]
