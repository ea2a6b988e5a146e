"""From a config to a run: what both frontends and the commands do when a person says go.

It resolves what is `auto`, keeps the complete text, and takes the few settings that the launcher itself needs. Findings
are the caller's business: a config with errors must not come here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine import model_files
from engine.config.facts import Facts
from engine.config.files import REMOTE, dump, scheme_of
from engine.config.reward_specs import reward_specs
from engine.config.tree import RunConfig
from engine.errors import UsageError, WorkbenchError, visible
from engine.facts.counts import longest_row
from engine.facts.model_shape import model_facts
from engine.hub import is_local
from engine.planning.auto import choices, resolved
from engine.planning.memory_model import device_bytes
from engine.planning.unused_packages import unused
from engine.run import store
from engine.run.launch import choose_free, launch, wanted
from engine.run.nodes import Rendezvous
from engine.run.slurm import Job
from engine.run.spawn import COMET_KEY, HUB_TOKENS, MLFLOW_LOGIN, STORE_KEYS, WANDB_KEY
from engine.run.store import RunFolder
from engine.run.warm import WarmWorker

_OF_TRACKERS = {"wandb": (WANDB_KEY,), "mlflow": MLFLOW_LOGIN, "comet": (COMET_KEY,)}
"""The variables with secrets that a tracker needs."""


def runs_dir_of(config: RunConfig, given: frozenset[str], explicit: str | os.PathLike[str] | None = None) -> Path:
    """`--runs`, else `run.output_dir` where the person wrote it, else $WORKBENCH_RUNS, else ./runs."""
    return store.runs_dir(explicit, config.run.output_dir if "run.output_dir" in given else None)


def secrets_of(config: RunConfig, facts: Facts) -> list[str]:
    """The names of variables with secrets that a worker needs: the tokens of the hub and of object stores while something
    must be fetched from there or is pushed, a tracker's key where it is asked for."""
    specs = reward_specs(getattr(config.method, "reward_funcs", ()))
    names = [config.model.name, config.model.tokenizer, *(spec.argument for spec in specs if spec.kind == "model")]
    known = facts.sources or {}
    data = [entry.path for entry in (*config.data.train, *config.data.eval)]
    from_hub = any(not _is_here(name, config.model.revision) for name in names if name) or any(
        not is_local(path) and not scheme_of(path) and (path not in known or known[path].exists is None)
        for path in data
    )
    trackers = [name for tracker, names in _OF_TRACKERS.items() if tracker in config.run.report_to for name in names]
    stores = [name for path in data for name in STORE_KEYS.get(REMOTE.get(scheme_of(path), ""), ())]
    return list(dict.fromkeys([*(HUB_TOKENS if from_hub or config.run.push_to_hub else ()), *stores, *trackers]))


def _is_here(name: str, revision: str | None) -> bool:
    """Whether all files of a model are on this machine: a folder, or a snapshot of the hub with its weights."""
    if is_local(name):
        return True
    facts = model_facts(name, revision)
    try:
        return facts is not None and bool(facts.folder) and bool(model_files.stored_weights(Path(facts.folder)))
    except WorkbenchError:
        return False


def refuse_push_without_token(config: RunConfig) -> None:
    """Raises WorkbenchError where checkpoints are to be pushed and this machine has no token, or may not reach a hub: told here,
    before a model is loaded. Whether the token may write there the worker asks."""
    if not config.run.push_to_hub:
        return
    from huggingface_hub import get_token

    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    if offline.upper() in ("1", "ON", "YES", "TRUE"):  # as the process that sends reads it
        raise WorkbenchError(
            "run.push_to_hub: HF_HUB_OFFLINE forbids to reach the hub.", "Unset it, or remove run.push_to_hub."
        )
    if not get_token():
        raise WorkbenchError(
            "run.push_to_hub: the hub asks for a token, and there is none.",
            "Run `hf auth login`, or set HF_TOKEN; or remove run.push_to_hub.",
        )


def refuse_shared_repository(configs: Iterable[RunConfig]) -> None:
    """Raises UsageError where several runs that are started together would write over each other's model on a hub."""
    names = [config.run.hub_model_id for config in configs if config.run.push_to_hub]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(
            f"run.hub_model_id: {names.count(twice)} runs would write over each other's model in {visible(twice)}.",
            "Give each a repository of its own, or leave run.push_to_hub out and send the best one with `workbench push`.",
        )


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
    warm: WarmWorker | None = None,
    origin: str = "",
    job: Job | None = None,
    rendezvous: Rendezvous | None = None,
) -> RunFolder:
    """Start a run of this config, detached. `name` is used where `run.name` is not set; `source` is the config's file.

    `queue` and `after` let it wait, as in `launch`; `more` stands in its `run.json` too. A worker that waits at `warm`
    takes it where that one serves. `origin` says for which run this one is started: a sentence at the head of its config.

    With `job` it is handed over to SLURM, and what is `auto` is left to the node that it gets.

    `rendezvous` says where the nodes of a run on several machines meet; without it they ask for the first one's name.

    Raises WorkbenchError if it cannot start.
    """
    complete = resolved(config, facts) if job is None else config
    if job is None:
        refuse_push_without_token(config)
    info: dict[str, Any] = {
        "method": complete.method.kind,
        "model": complete.model.name,
        "seed": complete.run.seed,
        "grace_seconds": complete.run.grace_seconds,
        "forecast_bytes": forecast_bytes,
        "secrets": secrets_of(complete, facts),
        **({} if job is not None else of_machine(config, facts)),
    }
    if config.distributed.nodes > 1:
        meets = rendezvous or Rendezvous(config.distributed.nodes)
        info |= {"rendezvous": meets.as_json(), "asked": dump(config)}
    info |= more or {}
    if source is not None:
        info["source"] = str(Path(source).absolute())
    if origin:
        info[store.ORIGIN] = origin
    return launch(
        (f"# {visible(origin)}\n" if origin else "") + dump(complete),
        runs_dir=runs_dir,
        name=complete.run.name or name or f"{complete.method.kind}-{Path(complete.model.name).name}",
        # Unresolved: which GPU is free is known only now.
        devices=config.run.devices,
        info=info,
        queue=queue,
        after=after,
        warm=warm,
        without=unused(complete) if warm is not None else (),
        job=job,
    )


def of_machine(config: RunConfig, facts: Facts) -> dict[str, Any]:
    """What run.json keeps of the machine on which the run works: what each `auto` became there, its room, and the tokens of the
    longest row that it was chosen for."""
    room = device_bytes(config, facts) if facts.machine and facts.machine.gpus else None
    return {"auto": choices(config, facts), "device_bytes": room, "longest_row": longest_row(config, facts)}


def warm_up(warm: WarmWorker, config: RunConfig, facts: Facts, place: Path) -> None:
    """Have a worker wait for this config's run, whose folder would be made in `place`. Raises WorkbenchError."""
    if not warm.wanted():
        return
    complete = resolved(config, facts)
    chosen = choose_free(config.run.devices, place)
    info = {"method": complete.method.kind, "secrets": secrets_of(complete, facts)}
    if chosen.processes == 1:
        warm.prepare(wanted(info, chosen, unused(complete)))
