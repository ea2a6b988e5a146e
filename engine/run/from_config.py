"""From a config to a run: what both faces and the commands do when a person says go.

It resolves what is `auto`, keeps the complete text, and takes the few settings that the launcher itself needs. Findings
are the caller's business: a config with errors must not come here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine.config.defaults import choices
from engine.config.facts import Facts
from engine.config.files import dump
from engine.config.footprint import device_bytes
from engine.config.schema import RunConfig, resolved
from engine.run import store
from engine.run.launch import launch
from engine.run.store import RunFolder


def runs_dir_of(config: RunConfig, given: frozenset[str], explicit: str | os.PathLike[str] | None = None) -> Path:
    """`--runs`, else `run.output_dir` where the person wrote it, else $WORKBENCH_RUNS, else ./runs."""
    return store.runs_dir(explicit, config.run.output_dir if "run.output_dir" in given else None)


def launch_config(
    config: RunConfig,
    facts: Facts,
    *,
    runs_dir: str | os.PathLike[str],
    name: str | None = None,
    forecast_bytes: int | None = None,
    source: str | os.PathLike[str] | None = None,
) -> RunFolder:
    """Start a run of this config, detached. `name` is used where `run.name` is not set; `source` is the config's file.

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
        "device_bytes": device_bytes(config, facts) if facts.machine and facts.machine.gpus else None,
    }
    if source is not None:
        info["source"] = str(Path(source).absolute())
    return launch(
        dump(complete),
        runs_dir=runs_dir,
        name=complete.run.name or name or f"{complete.method.kind}-{Path(complete.model.name).name}",
        # Unresolved: which GPU is free is known only now.
        devices=config.run.devices,
        info=info,
    )
