"""From a config to a run: what both faces and the commands do when a person says go.

It resolves what is `auto`, keeps the complete text, and takes the few settings that the launcher itself needs. Findings
are the caller's business: a config with errors must not come here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine import model_files
from engine.config.facts import Facts
from engine.config.files import REMOTE, dump, scheme_of
from engine.config.reward_specs import reward_specs
from engine.config.tree import RunConfig
from engine.errors import WorkbenchError
from engine.facts.model_shape import model_facts
from engine.hub import is_local
from engine.planning.auto import choices, resolved
from engine.planning.memory_model import device_bytes
from engine.run import store
from engine.run.launch import launch
from engine.run.spawn import HUB_TOKENS, STORE_KEYS, WANDB_KEY
from engine.run.store import RunFolder


def runs_dir_of(config: RunConfig, given: frozenset[str], explicit: str | os.PathLike[str] | None = None) -> Path:
    """`--runs`, else `run.output_dir` where the person wrote it, else $WORKBENCH_RUNS, else ./runs."""
    return store.runs_dir(explicit, config.run.output_dir if "run.output_dir" in given else None)


def secrets_of(config: RunConfig, facts: Facts) -> list[str]:
    """The names of variables with secrets that a worker needs: the tokens of the hub and of object stores while something
    must be fetched from there, a tracker's key where it is asked for."""
    specs = reward_specs(getattr(config.method, "reward_funcs", ()))
    names = [config.model.name, config.model.tokenizer, *(each.argument for each in specs if each.kind == "model")]
    known = facts.sources or {}
    data = [entry.path for entry in (*config.data.train, *config.data.eval)]
    from_hub = any(not _is_here(name, config.model.revision) for name in names if name) or any(
        not is_local(path) and not scheme_of(path) and (path not in known or known[path].exists is None)
        for path in data
    )
    trackers = [WANDB_KEY] if "wandb" in config.run.report_to else []
    stores = [name for path in data for name in STORE_KEYS.get(REMOTE.get(scheme_of(path), ""), ())]
    return list(dict.fromkeys([*(HUB_TOKENS if from_hub else ()), *stores, *trackers]))


def _is_here(name: str, revision: str | None) -> bool:
    """Whether all files of a model are on this machine: a folder, or a snapshot of the hub with its weights."""
    if is_local(name):
        return True
    found = model_facts(name, revision)
    try:
        return found is not None and bool(found.folder) and bool(model_files.stored_weights(Path(found.folder)))
    except WorkbenchError:
        return False


def launch_config(
    config: RunConfig,
    facts: Facts,
    *,
    runs_dir: str | os.PathLike[str],
    name: str | None = None,
    forecast_bytes: int | None = None,
    source: str | os.PathLike[str] | None = None,
    queue: bool = False,
    after: RunFolder | None = None,
    more: Mapping[str, Any] | None = None,
) -> RunFolder:
    """Start a run of this config, detached. `name` is used where `run.name` is not set; `source` is the config's file.

    `queue` and `after` let it wait, as in `launch`; `more` stands in its `run.json` too.

    Raises WorkbenchError if it cannot start.
    """
    complete = resolved(config, facts)
    info: dict[str, Any] = {
        "method": complete.method.kind,
        "model": complete.model.name,
        "seed": complete.run.seed,
        "grace_seconds": complete.run.grace_seconds,
        "forecast_bytes": forecast_bytes,
        "auto": choices(config, facts),
        "secrets": secrets_of(complete, facts),
        "device_bytes": device_bytes(config, facts) if facts.machine and facts.machine.gpus else None,
    }
    info |= more or {}
    if source is not None:
        info["source"] = str(Path(source).absolute())
    return launch(
        dump(complete),
        runs_dir=runs_dir,
        name=complete.run.name or name or f"{complete.method.kind}-{Path(complete.model.name).name}",
        # Unresolved: which GPU is free is known only now.
        devices=config.run.devices,
        info=info,
        queue=queue,
        after=after,
    )
