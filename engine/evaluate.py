"""`python -P -m engine.evaluate`: the held-out metrics of a run's checkpoint, as its trainer measures them while training.

The trainer is built as the worker builds it, with the same model, features, collator and arguments, takes up the weights of
the checkpoint and evaluates once; nothing is trained and nothing is written. What the base is measured by is the same
trainer before it takes them up: the model with which training began.
"""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from engine.errors import WorkbenchError, visible
from engine.run import checkpoint, inside
from engine.run.evaluations import INSTALL, NOT_MEASURED
from engine.run.store import RunFolder
from engine.run.task import Message, Report, Send, serve

TASK_ROWS = 8
"""Requests of a task that are computed together."""

if TYPE_CHECKING:
    from peft import PeftModel

    from engine.config.tree import RunConfig
    from engine.data.prepare import Prepared
    from engine.features.sequence import Features
    from engine.trainers.run_trainer import RunTrainer


def answer(asked: Message, send: Send, report: Report) -> Message:
    """What was measured: `checkpoint`, `step`, `rows`, `metrics` and `base`, both by the names that the trainer logs, each
    number null where it is not finite. Raises WorkbenchError."""
    begun = time.monotonic()
    run = RunFolder(asked["run"])
    if asked.get("tasks"):
        return {**_by_tasks(run, asked, report), "seconds": round(time.monotonic() - begun, 3)}
    folder = run.checkpoints / f"checkpoint-{asked['step']}"
    report("Reading the checkpoint", 0, 1)
    if reason := checkpoint.problem_with(folder, hashes=True):
        raise WorkbenchError(f"run {visible(run.id)}: {folder.name} cannot be measured: it {reason}.")
    config = _config(run, asked["data"])
    origin = asked["data"] or ("data.eval" if config.data.eval else "data.val_set_size")
    report("Loading the libraries", 0, 1)
    from engine.compat import import_warnings

    with import_warnings.dropped():
        import transformers

        from engine.data.prepare import prepare
        from engine.hub import COMMITS, COMMITS_FILE
        from engine.models.load import load_processing_class

    transformers.utils.logging.set_verbosity_error()
    seeded = transformers.enable_full_determinism if config.run.full_determinism else transformers.set_seed
    seeded(config.run.seed)
    # Models of the hub are those that the run began with.
    COMMITS.keep(inside.read(run, COMMITS_FILE) if inside.exists(run, COMMITS_FILE) else None, lambda _: None)
    report("Loading the tokenizer", 0, 1)
    processing_class = load_processing_class(config)
    rows = prepare(config, processing_class, "eval", report)
    if asked["data"] is None:
        _require_same_rows(run, rows, processing_class)
    report("Loading the model", 0, 1)
    begins = _begins_from(config, folder, asked["base"])
    trainer, features = _trainer(run, config, processing_class, rows, report, begins)
    try:
        before, metrics = _both(trainer, folder, asked, report)
    finally:
        if (rewards := getattr(trainer, "rewards", None)) is not None:
            rewards.close()
        features.undo()
    return {
        "checkpoint": folder.name,
        "step": asked["step"],
        "method": config.method.kind,
        "rows": len(rows.dataset),
        "data": origin,
        "fingerprint": rows.fingerprint,
        "metrics": metrics,
        "base": before,
        "begins_from": _adapter_begun(config),
        "seconds": round(time.monotonic() - begun, 3),
    }


def _both(trainer: RunTrainer, folder: Path, asked: Message, report: Report) -> tuple[Message | None, Message]:
    """What the model measures as training began, where that is asked for, and with the weights of the checkpoint."""
    before = None
    if asked["base"]:
        report("Measuring the base", 0, 1)
        before = _measured(trainer, 0)
    report(f"Measuring {folder.name}", 0, 1)
    trainer.take_weights(folder)
    return before, _measured(trainer, asked["step"])


def _adapter_begun(config: RunConfig) -> str | None:
    """The adapter that training went on from, which is part of the model as it began; None where there is none."""
    return config.adapter.path or None if config.adapter.kind == "lora" else None


def _begins_from(config: RunConfig, folder: Path, base: bool) -> Path | None:
    """The folder of the adapter as training began, where what is measured is held to it or begins as it; else None."""
    from engine.features.compile.gate import COPY
    from engine.models.adapter_folder import as_begun, beginning

    found = beginning(config, folder, COPY)
    return as_begun(config) if found is None and base else found


def _require_same_rows(run: RunFolder, rows: Prepared, processing_class: Any) -> None:
    """Raises WorkbenchError where the run's own held-out rows are not those it was measured by."""
    from engine.data.compare import differences

    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    for difference in differences(run, {"eval": rows}, tokenizer, tolerant=True):
        if difference.split == "eval" and difference:
            raise WorkbenchError(
                f"run {visible(run.id)}: its held-out rows are others now, so its numbers would mean something else: "
                f"{difference.sentence}.",
                "Put the rows back, or name a file with --data.",
            )


def _by_tasks(run: RunFolder, asked: Message, report: Report) -> Message:
    """What `answer` tells, by the scores of lm-evaluation-harness: `task/metric`, the base beside the checkpoint."""
    report("Loading the libraries", 0, 1)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks._yaml_loader import load_yaml
    except ImportError as problem:
        raise WorkbenchError(f"--tasks: lm-evaluation-harness cannot be imported here: {problem}.", INSTALL) from None
    from yaml import YAMLError

    from engine.chat.models import load_sides
    from engine.config.method import METHODS

    step, name = asked["step"], f"checkpoint-{asked['step']}"
    first = {"title": "base", "run": str(run.path), "checkpoint": None, "as_begun": True}
    wanted: list[Message] = [first] if asked["base"] else []
    wanted.append({"title": name, "run": str(run.path), "checkpoint": step})
    sides = load_sides(wanted, lambda what: report(what, 0, 1))
    method = sides[-1].config.method.kind
    if METHODS[method].head != "vocabulary":
        raise WorkbenchError(f"--tasks: must be for a model that writes text; {method} trains one that does not.")
    scores: dict[str, dict[str, float | None]] = {}
    rows: dict[str, int] = {}
    for side in sides:
        scores[side.title] = {}
        with side.active() as model:
            harness = HFLM(pretrained=model, tokenizer=side.tokenizer, batch_size=TASK_ROWS, max_length=side.positions)
            for place in map(Path, asked["tasks"]):
                report(f"Measuring {side.title} by {visible(place.name)}", 0, 1)
                # Files that a task names lie beside it; what is wrong with it is told in the harness's words.
                with contextlib.chdir(place.parent):
                    try:
                        task = {"task": place.stem, **load_yaml(place.name)}
                        result = simple_evaluate(
                            harness, tasks=[task], bootstrap_iters=0, log_samples=False, random_seed=0
                        )
                    except Exception as problem:
                        lines = str(problem).splitlines()
                        if isinstance(problem, YAMLError):  # which says where in its second line
                            lines = [" ".join(" ".join(lines).split())]
                        why = next(iter(lines), "") or type(problem).__name__
                        why += " is not there" if isinstance(problem, KeyError) else ""
                        raise WorkbenchError(f"--tasks: {visible(str(place))} cannot be measured: {why}") from problem
                for each, numbers in result["results"].items():
                    rows[each] = result["n-samples"][each]["effective"]
                    scores[side.title] |= _scores(each, numbers)
    return {
        "checkpoint": name,
        "step": step,
        "method": method,
        "rows": sum(rows.values()),
        "data": ", ".join(asked["tasks"]),
        "fingerprint": None,
        "metrics": scores[name],
        "base": scores.get("base"),
        "begins_from": _adapter_begun(sides[-1].config),
    }


def _scores(task: str, numbers: Message) -> dict[str, float | None]:
    """The harness's scores of one task by `task/metric`, a filter's name behind it; None where one is not finite."""
    scores: dict[str, float | None] = {}
    for key, value in numbers.items():
        metric, _, by = key.partition(",")
        if isinstance(value, int | float) and "_stderr" not in metric and by:
            named = f"{task}/{metric}" + ("" if by == "none" else f" ({by})")
            scores[named] = float(value) if math.isfinite(value) else None
    return scores


def _config(run: RunFolder, data: str | None) -> RunConfig:
    """The run's config, no `auto` left, with the rows of a file in the place of its held-out ones where one is named.

    Raises WorkbenchError where there are none.
    """
    from engine.config.files import parse
    from engine.config.kinds import BUILTIN_ROWS
    from engine.data.gather_facts import resolved_config

    mapping = dict(parse(run.read_config(), path=run.config).mapping)
    if data is not None:
        section = dict(mapping.get("data") or {})
        how = {"split": "eval"} if data in BUILTIN_ROWS else _shape(section)
        section["eval"] = [{**how, "path": data}]
        section.pop("val_set_size", None)
        mapping["data"] = section
    # What is for training alone: a tracker would begin a run of its own.
    mapping["run"] = {**(mapping.get("run") or {}), "report_to": []}
    config = resolved_config(mapping, run.path, run.read_json().get("auto"))
    if not config.data.evaluates:
        raise WorkbenchError(
            f"run {visible(run.id)} held no rows out, so there is nothing to measure it by.",
            "Name rows that it was not trained on with --data FILE.",
        )
    return config


def _shape(section: dict[str, Any]) -> dict[str, Any]:
    """How rows of the run are read: its first held-out source, else its first one to train on, without what names rows."""
    for name in ("eval", "train"):
        for source in section.get(name) or []:
            if isinstance(source, dict):
                return {key: source[key] for key in ("format", "columns", "properties", "roles") if key in source}
    return {}


def _trainer(
    run: RunFolder, config: RunConfig, processing_class: Any, rows: Prepared, report: Report, begun: Path | None
) -> tuple[RunTrainer, Features]:
    """The run's trainer as it is before the first step, with these rows held out, and the features that act on it. Its adapter
    is that of the folder `begun`, or a new one."""
    from transformers import PrinterCallback

    from engine.data.collate import collator_for
    from engine.features.built import Built, Notes
    from engine.features.load import load
    from engine.features.sequence import Features
    from engine.models.adapter_folder import load_adapter
    from engine.models.adapters import add_adapter
    from engine.models.vocabulary import refuse_tokens_without_weights
    from engine.trainers.job import Job
    from engine.trainers.table import method

    module = method(config.method.kind)
    trained = _rows_to_build_with(run, config, processing_class, rows, report)
    if (needed := getattr(module.arguments(config, run.path), "generation_batch_size", None) or 0) > len(trained):
        # Where answers are sampled there must be as many prompts as a step would take.
        trained = trained.select([place % len(trained) for place in range(needed)])
    loaded = load(config)
    refuse_tokens_without_weights(config, loaded.model, processing_class, {"data.eval": rows.dataset})
    model = add_adapter(loaded.model, config)
    if begun is not None:
        load_adapter(cast("PeftModel", model), config, begun)
    features, notes = Features(config), Notes(run.path)
    features.prepare(Built(model, notes=notes))
    collator = collator_for(config, processing_class)
    trainer: RunTrainer = module.build(
        Job(config, run.path, model, processing_class, collator, trained, rows.dataset, [])
    )
    trainer.remove_callback(PrinterCallback)
    trainer.attach(run, None, config.run.save_total_limit, {})
    features.apply(trainer.built(notes))
    return trainer, features


def _rows_to_build_with(
    run: RunFolder, config: RunConfig, processing_class: Any, rows: Prepared, report: Report
) -> Any:
    """What stands for the training rows, none of which is trained on: the held-out ones, but where what is measured
    depends on those that the run learns from."""
    from engine.config.preference import Kto
    from engine.data.prepare import prepare
    from engine.data.streaming.stream import open_stream

    if not isinstance(config.method, Kto) or not config.method.balance_weights:
        return rows.dataset
    own = _config(run, None)
    if not own.data.streaming:
        return prepare(own, processing_class, "train", report).dataset
    batch = int(own.optim.per_device_train_batch_size) * own.optim.gradient_accumulation_steps
    streamed = open_stream(own, processing_class, look=batch * int(run.read_json().get("processes") or 1))
    streamed.stream.close()
    return streamed.dataset


def _measured(trainer: RunTrainer, step: int) -> dict[str, float | None]:
    """The metrics as the trainer logs them at a step."""
    from transformers import TrainerCallback

    logged: dict[str, Any] = {}

    class Logged(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            logged.update(logs or {})

    listener = Logged()
    trainer.add_callback(listener)
    trainer.state.global_step = step
    trainer.evaluate()
    trainer.remove_callback(listener)
    numbers = {
        name: float(value)
        for name, value in logged.items()
        if name.startswith("eval_") and isinstance(value, int | float) and not name.endswith(NOT_MEASURED)
    }
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


if __name__ == "__main__":
    serve(answer, "evaluation")
