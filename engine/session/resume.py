"""Resuming a run as a person asks for it: a changed config has to fit, its rows are held to its record, then it goes on.

What the commands, the app and the notebook call. Where every source is the file it was, nothing is prepared here; else the
inspector compares the prepared rows with the run's record, so that the run stays as it is while a person decides. The worker
compares once more, since a tokenizer may have changed too.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.client import ask_once
from engine.config.adapter import Lora
from engine.config.facts import Facts, ModelFacts
from engine.config.files import absolute, load, parse, put
from engine.config.findings import shown
from engine.config.tree import RunConfig, fields
from engine.errors import ConfigUnreadable, RunBusy, UsageError, WorkbenchError, redact, visible
from engine.model_files import ADAPTER, NO_FOLDER
from engine.run import checkpoint, data_record, inside, launch, slurm
from engine.run.data_record import DataChanged
from engine.run.store import ENDED, RunFolder, called

_TOGETHER = fields.distributed.reshard_after_forward
_SKIPPED = fields.method.skip_zero_advantage
_ANEW = fields.data.ignore_data_skip
_OF_LORA = (
    "r", "lora_alpha", "use_rslora", "use_dora", "bias", "target_modules", "target_parameters", "modules_to_save",
    "loraplus_lr_ratio",
)  # fmt: skip
_STATES_ALIKE = (("adamw_torch", "adamw_torch_fused"), ("adamw_8bit", "paged_adamw_8bit"))
"""Optimizers of which one goes on with the states of the other."""
_MAKE_ROWS = ("data.", "method.", "model.name", "model.tokenizer", "model.chat_template", fields.run.seed.path)
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
    refuse_what_was_trained_otherwise(run, settings or {})
    refuse_what_no_longer_fits(run, settings or {})
    if not settings:
        return _go_on(run, accept_data, on_progress)
    before = run.read_config()
    text = changed_config(run, settings)
    secrets = _secrets_of(run, text)
    launch.settle(run)
    if launch.at_work(run):
        raise RunBusy(f"run {visible(run.id)} is still {run.state}.", "Stop it first, then change its settings.")
    inside.replace(run, run.config, text)
    run.update_json(secrets=secrets)
    try:
        return _go_on(run, accept_data, on_progress)
    except BaseException:
        if not launch.at_work(run):
            inside.replace(run, run.config, before)
        raise


def _secrets_of(run: RunFolder, text: str) -> list[str]:
    """The variables with secrets that the run needs with this config, those that it needed before among them. Raises
    WorkbenchError where it is to push to a hub and there is no token."""
    from engine.rules import read
    from engine.run.from_config import refuse_push_without_token, secrets_of

    config = read(absolute(parse(text).mapping, run.path)).config
    refuse_push_without_token(config)
    return list(dict.fromkeys([*(run.read_json().get("secrets") or ()), *secrets_of(config, Facts())]))


def _go_on(
    run: RunFolder, accept_data: bool, on_progress: Progress | None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    _refuse_what_is_gone(run)
    if not accept_data:
        launch.settle(run)
        if run.state in ENDED and (changes := data_changes(run, on_progress)):
            raise DataChanged(run, changes)
    auto = run.read_json().get("auto") or {}
    anew = {} if launch.at_work(run) else _reasons_anew(run, auto)
    if anew:
        run.update_json(auto={**auto, **anew})
    try:
        return launch.resume(run, **({"accept_data": True} if accept_data else {}))
    except BaseException:
        if anew and not launch.at_work(run):
            run.update_json(auto=auto)
        raise


def _reasons_anew(run: RunFolder, auto: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By path, what the launch chose by settings that were changed since: with the reason that it has now, or with the launch's
    where the run keeps what would not be chosen any more. Empty where none is, and for a run whose node chooses."""
    changed = launch.changed_settings(run)
    if not changed or not auto or slurm.is_job(run):
        return {}
    from engine.data.gather_facts import gather_facts
    from engine.planning.auto import choices
    from engine.rules import read

    texts = run.read_json()["config"], run.read_config()
    before, now = (read(absolute(parse(text).mapping, run.path)).config for text in texts)
    left = [spec for spec in fields if spec.path in auto and spec.value(now) in ("auto", auto[spec.path]["value"])]
    facts = gather_facts(now, run.path, sources=False)
    then, today = (choices(each.with_values(dict.fromkeys(left, "auto")), facts) for each in (before, now))
    found: dict[str, dict[str, Any]] = {}
    for spec in left:
        choice, chosen = auto[spec.path], today.get(spec.path)
        if chosen is None or chosen == then.get(spec.path):
            continue
        reason = choice.get("at_launch", choice.get("reason"))
        if spec.value(now) not in ("auto", chosen["value"]):
            names = ", ".join(line.partition(":")[0] for line in changed)
            chosen = {"value": choice["value"], "reason": f"kept from the launch ({reason}); {names} changed since"}
        found[spec.path] = {**chosen, "at_launch": reason}
    return found


def _refuse_what_is_gone(run: RunFolder) -> None:
    """Raises UsageError for rows or a model that are no longer there. What one of SLURM's runs reads may not be seen from here."""
    if slurm.is_job(run):
        return
    from engine.data.gather_facts import inspect_source
    from engine.facts.model_shape import model_facts
    from engine.rules import read

    config, gone = read(load(run.config).mapping).config, dict[str, tuple[str, str]]()
    for split, entries in (("train", config.data.train), ("eval", config.data.eval)):
        for number, entry in enumerate(entries):
            if entry.path and inspect_source(entry, run.path).exists is False:
                gone[f"data.{split}.{number}.path"] = ("file, folder or data set", entry.path)
    model = model_facts(config.model.name, config.model.revision)
    if model is not None and model.missing == NO_FOLDER:
        gone[fields.model.name.path] = ("folder", config.model.name)
    for path, (what, got) in gone.items():
        raise UsageError(
            f"run {visible(run.id)} cannot go on: {path}: must be a {what} that exists; got {visible(redact(got))}.",
            f"Put it back, or name where it is now: `workbench resume {called(run)} {path}=...`.",
        )


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


def refuse_what_was_trained_otherwise(run: RunFolder, settings: Mapping[str, Any]) -> None:
    """Raises UsageError where a changed config makes another model of it than the newest checkpoint's: by another base, method or
    optimizer, by other weights that train, or by rows in another order behind those that were trained on."""
    if not (settings or launch.changed_settings(run)):
        return
    from engine.rules import read

    newest, _ = checkpoint.newest_valid(run, hashes=False)
    if newest is None:
        return
    last = run.read_json().get("config")
    try:
        before = read(absolute(parse(last if isinstance(last, str) else run.read_config()).mapping, run.path)).config
        reading = read(absolute(_changed_mapping(run, settings)[2], run.path))
    except (UsageError, ConfigUnreadable):
        return  # said where it is taken
    stored = inside.read_json(run, newest / ADAPTER, 1 << 20)
    bad, now = {finding.path for finding in reading.errors}, reading.config
    trained = {**_trained(before), **_order(before), **_of_adapter(stored)}
    for path, value in {**_trained(now), **({} if now.data.ignore_data_skip else _order(now))}.items():
        old = trained.get(path, value)
        if path in bad or _same(old, value) or any(old in names and value in names for names in _STATES_ALIKE):
            continue
        if path == fields.adapter.target_modules.path and _same(stored.get("target_modules"), value):
            continue  # PEFT names the layers that all-linear or an expression has found
        was, given = _told(old, value), _told(value, old)
        also = f", or begin the epoch anew with {_ANEW.path}=true" if path in _order(now) else ""
        raise UsageError(
            f"run {visible(run.id)} cannot go on so: {path}: must stay {was}, which {newest.name} was trained with; got {given}.",
            f"Leave it at {was}{also}, or start a new run with {given}.",
        )
    _refuse_an_adapter_to_begin_from(run, newest, before, now)
    if not bad & {fields.model.name.path, fields.model.revision.path}:
        _refuse_another_base(run, newest, before, now)


def _trained(config: RunConfig) -> dict[str, Any]:
    """The settings that say which weights and optimizer states a checkpoint holds, by their paths."""
    names = _OF_LORA if isinstance(config.adapter, Lora) else ("unfrozen_parameters",)
    return {
        fields.method.kind.path: config.method.kind,
        "adapter.kind": config.adapter.kind,
        **{f"adapter.{name}": getattr(config.adapter, name) for name in names},
        fields.model.train_vision.path: config.model.train_vision,
        fields.optim.optim.path: config.optim.optim,
    }


def _same(one: object, other: object) -> bool:
    """Whether two values are one; names in a list are the same in whatever order."""
    return set(one) == set(other) if isinstance(one, list) and isinstance(other, list) else one == other


def _told(value: Any, other: Any) -> str:
    """A value beside another one: of long lists what the other does not have."""
    if not (isinstance(value, list) and isinstance(other, list) and len(value) > 4):
        return shown(value)
    own = sorted(set(value) - set(other))
    return f"{shown(value)} with {shown(own)}" if own else shown(value)


def _order(config: RunConfig) -> dict[str, Any]:
    """The settings by which rows come in their order, in which a checkpoint has its place."""
    order = fields.data.packing, fields.data.streaming, fields.data.shuffle, fields.run.seed
    return {spec.path: spec.value(config) for spec in order}


def _of_adapter(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What the file beside an adapter says of the shape of its matrices, as our settings; nothing where there is none."""
    said = {f"adapter.{name}": stored[name] for name in ("r", "use_dora", "bias") if name in stored}
    return {"adapter.kind": "lora", **said} if stored else {}


def _refuse_another_base(run: RunFolder, newest: Path, before: RunConfig, now: RunConfig) -> None:
    """Raises UsageError where the base is another one. One that is no longer where it was may be named by its new folder."""
    from engine.facts.model_shape import model_facts

    name, revision = fields.model.name, fields.model.revision
    if (moved := name.value(before) != name.value(now)) or revision.value(before) != revision.value(now):
        was, new = (model_facts(config.model.name, config.model.revision) for config in (before, now))
        # A checkpoint of all weights says of which shape its model is, an adapter does not.
        kept = model_facts(str(newest)) if (newest / "config.json").is_file() else None
        gone = was is None or bool(was.missing) or was.remote
        here = new is not None and bool(new.folder) and not new.missing
        if was and new and was.folder and new.folder and os.path.realpath(was.folder) == os.path.realpath(new.folder):
            return  # another name of one folder
        if moved and gone and here and (kept is None or _shape(kept) == _shape(new)):
            return
        spec = name if moved else revision
        stays, given = (visible(redact(spec.value(config) or "nothing")) for config in (before, now))
        raise UsageError(
            f"run {visible(run.id)} cannot go on so: {spec.path}: must stay {stays}, which {newest.name} was trained from; "
            f"got {given}.",
            f"Leave it at {stays}, or start a new run with {given}; a base that was moved is named by the folder that holds it now.",
        )


def _refuse_an_adapter_to_begin_from(run: RunFolder, newest: Path, before: RunConfig, now: RunConfig) -> None:
    """Raises UsageError where an adapter is named for a run that has begun without: what it trains comes from its checkpoint. One
    that was named already may be named by another place, or be gone."""
    path = fields.adapter.path
    if now.adapter.kind == before.adapter.kind == "lora" and now.adapter.path and not before.adapter.path:
        raise UsageError(
            f"run {visible(run.id)} cannot go on so: {path.path}: must stay nothing, since {newest.name} holds the adapter that it "
            f"goes on with; got {shown(now.adapter.path)}.",
            "Leave it out, or start a new run with it.",
        )


def _shape(facts: ModelFacts | None) -> object:
    return facts and (facts.model_type, facts.hidden_size, facts.layers, facts.linears, facts.expert_weights)


def changed_config(run: RunFolder, settings: Mapping[str, Any]) -> str:
    """The text of the run's config with these values in it, nothing written. Raises WorkbenchError with its first error."""
    from engine.config.edit import rewrite
    from engine.rules import read

    text, before, after = _changed_mapping(run, settings)
    for finding in read(after).errors:
        raise UsageError(f"run {visible(run.id)} cannot go on so: {finding.message}")
    return rewrite(text, before, after)


def _changed_mapping(run: RunFolder, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The text of the run's config, what it says, and the same with these values in it. Raises UsageError for a setting that has
    no place, and ConfigUnreadable."""
    from engine.rules import read

    text = run.read_config()
    before = parse(text, path=run.config).mapping
    after = copy.deepcopy(before)
    auto, config = run.read_json().get("auto") or {}, read(before).config
    for spec in (_TOGETHER, *((_SKIPPED,) if fields.method.beta.path in settings else ())):
        chosen = auto.get(spec.path)
        if isinstance(chosen, Mapping) and spec.applies(config) and spec.value(config) == chosen.get("value"):
            put(after, spec.path, "auto")  # no weight hangs on it, and it follows from what is changed
    for path, value in settings.items():
        put(after, path, value)
    return text, before, after


def data_changes(run: RunFolder, on_progress: Progress | None = None) -> list[str]:
    """Sentences on what the run's rows teach otherwise than when it was trained on them; none where they are the same.

    Raises the error of rows that cannot be prepared any more, and RecordDamaged.
    """
    record = data_record.read(run)
    same = record is None or (data_record.files_unchanged(record) and not _rows_are_made_otherwise(run))
    if same or checkpoint.newest_valid(run, hashes=False)[0] is None:
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


def _rows_are_made_otherwise(run: RunFolder) -> bool:
    """Whether a setting was changed by which rows are made of the same files."""
    return any(line.startswith(_MAKE_ROWS) for line in launch.changed_settings(run))
