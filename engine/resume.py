"""Resuming a run as a person asks for it: its rows are held to its record first, then it goes on.

What the commands, the app and the notebook call. Where every source is the file it was, nothing is prepared here; else the
inspector compares the prepared rows with the run's record, so that the run stays as it is while a person decides. The worker
compares once more, since a tokenizer may have changed too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.client import Inspector
from engine.run import checkpoint, data_record, launch
from engine.run.data_record import DataChanged
from engine.run.store import ENDED, RunFolder

Progress = Callable[[dict[str, Any]], None]


def resume(
    run: RunFolder, *, accept_data: bool = False, on_progress: Progress | None = None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Go on with a run that ended, as `launch.resume` does.

    Raises DataChanged, with the run left as it was, where its rows teach otherwise now and `accept_data` is not set.
    """
    if accept_data:
        return launch.resume(run, accept_data=True)
    launch.settle(run)
    if run.state in ENDED and (said := data_changes(run, on_progress)):
        raise DataChanged(run, said)
    return launch.resume(run)


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
            found = ticket.result()
        except BaseException:
            ticket.cancel()
            raise
    return [entry["sentence"] for entry in found["splits"].values() if not entry["same"]]
