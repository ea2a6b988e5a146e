"""The model card: what was trained and measured, out of the run's folder and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine import figures
from engine.config.adapter import Lora
from engine.config.tree import RunConfig
from engine.errors import redact, visible
from engine.run import checkpoint
from engine.run.index import open_view
from engine.run.store import RunFolder

CURVES = ("loss", "eval_loss", "eval_reward", "reward", "mean_token_accuracy", "eval_mean_token_accuracy")


def card(
    run: RunFolder,
    config: RunConfig,
    source: Path,
    form: str,
    parity: Mapping[str, Any] | None,
    license: str,
    readers: str = "",
) -> str:
    """README.md of an artefact; `readers` says who opens one that not every reader of its form opens. `parity` is None for one
    that was sent while the run trains, and not opened again."""
    step = checkpoint.step_of(source)
    base = base_name(config.model.name)
    # A hub takes no card whose base is no name that a hub could have.
    local = config.model.name.startswith(("/", ".", "~", "builtin/"))
    front = ["---", *([] if local else [f"base_model: {json.dumps(base)}"])]
    front += [f"library_name: {'peft' if form == 'adapter' else 'gguf' if form == 'gguf' else 'transformers'}"]
    front += [f"license: {json.dumps(license)}"] if license else []
    front += ["tags:", f"- {config.method.kind}", *(["- lora"] if config.adapter.kind == "lora" else []), "---", ""]
    what = f"{base}, trained with {config.method.kind} in the run {shown(run.id)}, at step {step}."
    lines = [*front, f"# {shown(run.id)}", "", what, "", "## Training", "", *_table(_trained(config))]
    measured = _measured(run, step)
    if measured:
        lines += ["", "## Measured", "", "The newest values of the run up to this step.", "", *_table(measured)]
    lines += ["", "## This copy", "", *_table(_copy(form, parity, readers))]
    versions = (checkpoint.read_commit(source) or {}).get("versions") or {}
    if versions:
        lines += ["", "## Made with", "", ", ".join(f"{name} {version}" for name, version in versions.items())]
    return "\n".join(lines) + "\n"


def base_name(name: str) -> str:
    """The base as others may know it: of a folder of this machine its own name, and not where it lies."""
    return shown(Path(name).name if Path(name).is_absolute() else name)


def shown(text: str) -> str:
    """A name as the card may hold it: no secret, no home directory, nothing that hides."""
    return visible(redact(text))


def _trained(config: RunConfig) -> list[tuple[str, str]]:
    adapter, optim = config.adapter, config.optim
    rows = [("base model", base_name(config.model.name))]
    if config.model.revision:
        rows.append(("revision", shown(config.model.revision)))
    rows += [
        ("method", config.method.kind),
        ("number format", config.model.dtype),
        ("base held in", config.model.quantization if config.model.quantization != "none" else config.model.dtype),
    ]
    if adapter.kind == "lora":
        kind = "DoRA" if adapter.use_dora else "rsLoRA" if adapter.use_rslora else "LoRA"
        rows.append(("adapter", f"{kind}, r {adapter.r}, alpha {adapter.lora_alpha}, on {_targets(adapter)}"))
        if adapter.modules_to_save:
            rows.append(("trained whole", ", ".join(adapter.modules_to_save)))
    else:
        rows.append(("adapter", "none: the weights themselves"))
    for name, entries in (("rows", config.data.train), ("held-out rows", config.data.eval)):
        if entries:
            rows.append(
                (
                    name,
                    ", ".join(
                        shown(Path(each.path).name if "/" in each.path and Path(each.path).is_absolute() else each.path)
                        for each in entries
                    ),
                )
            )
    rows += [
        ("optimizer", f"{optim.optim}, learning rate {_number(optim.learning_rate)}, {optim.lr_scheduler_type}"),
        ("batch", f"{optim.per_device_train_batch_size} x {optim.gradient_accumulation_steps}"),
        ("seed", str(config.run.seed)),
    ]  # fmt: skip
    return rows


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else figures.number(value)


def _targets(adapter: Lora) -> str:
    modules = [adapter.target_modules] if isinstance(adapter.target_modules, str) else adapter.target_modules
    return ", ".join((*modules, *adapter.target_parameters))


def _measured(run: RunFolder, step: int | None) -> list[tuple[str, str]]:
    rows = []
    with open_view(run) as watch:
        watch.read_completely()
        for name, series in watch.view.series.items():
            if name in CURVES or name.startswith("eval_"):
                steps, low, _ = series.points(stop=step)
                if steps:
                    rows.append((f"{name} at step {steps[-1]}", figures.number(low[-1], 4)))
    return rows


def _copy(form: str, parity: Mapping[str, Any] | None, readers: str) -> list[tuple[str, str]]:
    if parity is None:
        return [("form", form), ("compared", "not: the checkpoint as it was saved, sent while the run trained")]
    rows = [("form", f"{form}, one for each expert" if readers else form)]
    rows += [("read by", readers)] if readers else []
    rows.append(("opened again by", str(parity.get("reader", ""))))
    if parity.get("logits_error") is not None:
        rounded = parity.get("rounding_effect")
        rows.append(
            (
                f"logits against the trained model{'' if rounded is None else ', rounded alike'}",
                f"{parity['logits_error']:.2g} of their size apart"
                + ("" if parity.get("bound") is None else f", at most {parity['bound']:g} allowed"),
            )
        )
        if rounded is not None:
            rows.append(("what rounding moved the logits by", f"{rounded:.2g} of their size"))
    for each in parity.get("requantized") or ():
        moved = f"moved {each['kept']:.2g} times as far as trained, cosine {each['cosine']:.2g}"
        rows.append((f"rounding {shown(each['kind'])}", f"{each['error']:.2g} of its size; {moved}"))
    rows.append(("same prompts and ids", f"{parity.get('prompts', 0)} conversations, {parity.get('probes', 0)} texts"))
    rows.append(("stop tokens", " ".join(f"`{shown(each)}`" for each in parity.get("stop_tokens", []))))
    return rows


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    escaped = [(name, value.replace("|", "\\|")) for name, value in rows]
    return ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in escaped)]
