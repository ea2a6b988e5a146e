"""Resuming a run as a person asks for it: a changed config has to fit, its rows are held to its record, then it goes on.

What the commands, the app and the notebook call. Where every source is the file it was, nothing is prepared here; else the
inspector compares the prepared rows with the run's record, so that the run stays as it is while a person decides. The worker
compares once more, since a tokenizer may have changed too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.client import ask_once
from engine.config.adapter import Lora
from engine.config.files import absolute, load, parse, put
from engine.config.findings import shown
from engine.config.tree import fields
from engine.errors import RunBusy, UsageError, WorkbenchError, visible
from engine.model_files import ADAPTER
from engine.run import checkpoint, data_record, inside, launch, slurm
from engine.run.data_record import DataChanged
from engine.run.store import ENDED, RunFolder

_TOGETHER = fields.distributed.reshard_after_forward
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
    WorkbenchError for settings that the rules refuse and for a config that no longer fits. Where it does not go on, config.yaml
    is as it was.
    """
    refuse_what_no_longer_fits(run, settings or {})
    refuse_another_adapter(run, settings or {})
    if not settings:
        return _go_on(run, accept_data, on_progress)
    before = run.read_config()
    text = changed_config(run, settings)
    launch.settle(run)
    if launch.at_work(run):
        raise RunBusy(f"run {visible(run.id)} is still {run.state}.", "Stop it first, then change its settings.")
    inside.replace(run, run.config, text)
    try:
        return _go_on(run, accept_data, on_progress)
    except BaseException:
        if not launch.at_work(run):
            inside.replace(run, run.config, before)
        raise


def _go_on(
    run: RunFolder, accept_data: bool, on_progress: Progress | None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    if accept_data:
        return launch.resume(run, accept_data=True)
    launch.settle(run)
    if run.state in ENDED and (changes := data_changes(run, on_progress)):
        raise DataChanged(run, changes)
    return launch.resume(run)


def refuse_what_no_longer_fits(run: RunFolder, settings: Mapping[str, Any]) -> None:
    """Raises WorkbenchError where a changed config, one for fewer devices say, wants more memory than they have. A run whose
    config is as it was has been judged when it was launched, and one of SLURM's gets a machine that nobody sees from here."""
    if slurm.is_job(run) or not (settings or launch.changed_settings(run)):
        return
    from engine.data.gather_facts import gather_facts
    from engine.rules import read
    from engine.rules.fit import it_fits_into_memory

    try:
        text = changed_config(run, settings)
    except UsageError:
        return  # what is wrong with it is said where it is taken, behind what is wrong with the folder
    config = read(absolute(parse(text).mapping, run.path)).config
    for finding in it_fits_into_memory(config, gather_facts(config, run.path, sources=False)):
        if finding.severity == "error":
            raise WorkbenchError(
                f"run {visible(run.id)} cannot go on so: {finding.message}",
                "It stays as it is, with its checkpoints.",
            )


def refuse_another_adapter(run: RunFolder, settings: Mapping[str, Any]) -> None:
    """Raises UsageError where a changed config describes an adapter whose matrices the newest checkpoint's do not fit."""
    if not (settings or launch.changed_settings(run)):
        return
    from engine.rules import read

    newest, _ = checkpoint.newest_valid(run, hashes=False)
    stored = inside.read_json(run, newest / ADAPTER, 1 << 20) if newest is not None else {}
    if newest is None or not stored:
        return
    try:
        adapter = read(parse(changed_config(run, settings)).mapping).config.adapter
    except UsageError:
        return  # said where it is taken
    now: dict[str, object] = {"kind": adapter.kind}
    if isinstance(adapter, Lora):
        now |= {"r": adapter.r, "use_dora": adapter.use_dora, "bias": adapter.bias}
        _refuse_other_groups(run, adapter)
    for name, value in now.items():
        trained = "lora" if name == "kind" else stored.get(name, value)
        if trained != value:
            before, given = shown(trained), shown(value)
            raise UsageError(
                f"run {visible(run.id)} cannot go on so: adapter.{name}: must stay {before}, which {newest.name} was trained with; "
                f"got {given}.",
                f"Leave it at {before}, or start a new run with {given}.",
            )


def _refuse_other_groups(run: RunFolder, adapter: Lora) -> None:
    """Raises UsageError where weights would learn at other rates than the optimizer's states in the checkpoint know."""
    from engine.rules import read

    before = read(parse(run.read_config()).mapping).config.adapter
    was = before.loraplus_lr_ratio if isinstance(before, Lora) else None
    now = adapter.loraplus_lr_ratio
    if (was is None) is not (now is None):
        raise UsageError(
            f"run {visible(run.id)} cannot go on so: adapter.loraplus_lr_ratio: must stay {shown(was)}, as the optimizer's states "
            f"are in one group of weights or in two; got {shown(now)}.",
            f"Leave it at {shown(was)}, or start a new run with {shown(now)}.",
        )


def changed_config(run: RunFolder, settings: Mapping[str, Any]) -> str:
    """The text of the run's config with these values in it, nothing written. Raises WorkbenchError with its first error."""
    from engine.config.edit import rewrite
    from engine.rules import read

    text = run.read_config()
    before = parse(text, path=run.config).mapping
    after = copy.deepcopy(before)
    chosen = (run.read_json().get("auto") or {}).get(_TOGETHER.path)
    if isinstance(chosen, Mapping) and _TOGETHER.value(read(before).config) == chosen.get("value"):
        put(after, _TOGETHER.path, "auto")  # no number hangs on it, and other devices have other room
    for path, value in settings.items():
        put(after, path, value)
    for finding in read(after).errors:
        raise UsageError(f"run {visible(run.id)} cannot go on so: {finding.message}")
    return rewrite(text, before, after)


def data_changes(run: RunFolder, on_progress: Progress | None = None) -> list[str]:
    """Sentences on what the run's rows teach otherwise than when it was trained on them; none where they are the same.

    Raises the error of rows that cannot be prepared any more, and RecordDamaged.
    """
    record = data_record.read(run)
    if record is None or data_record.files_unchanged(record) or checkpoint.newest_valid(run, hashes=False)[0] is None:
        return []
    changes = ask_once(
        "against",
        on_progress=on_progress,
        config=load(run.config).mapping,
        base=str(run.path),
        run=str(run.path),
        count=0,
    )
    return [entry["sentence"] for entry in changes["splits"].values() if not entry["same"]]
