"""What an adapter is by its folder, read as JSON and by the header of its weights: nothing in it is run or believed.

PEFT's `adapter_config.json` has settings for some twenty inventions. What the workbench has a setting for is taken over, what
does not change what is computed is passed over, and anything else that is set is refused by its name: passed over, the
adapter would become another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine import model_files
from engine.config.adapter_folder import OF_THE_FOLDER
from engine.config.coercion import Uncoerced, expectation, fit
from engine.config.facts import AdapterFacts
from engine.config.findings import shown
from engine.errors import ModelError, visible

_ANOTHER = "Another one can be named, or this one merged into its model first."
# Of the training that is over, or told by the weights' own names, which are compared when they are read.
_PASSED_OVER = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "task_type",
})  # fmt: skip
# Starts that take a part out of the base model: beside the model as it was, what is stored is half of an adapter.
_TAKE_FROM_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_HEADS = {"SEQ_CLS": {"classifier", "score"}, "TOKEN_CLS": {"classifier", "score"}}
"""Modules that PEFT names in `modules_to_save` itself, by the task: the new head."""


def adapter_facts(folder: Path, path: str) -> AdapterFacts:
    """The adapter in a folder, which the config writes as `path`. Never raises for what the folder holds: that is a problem."""
    try:
        return _read(folder, path)
    except ModelError as problem:
        return AdapterFacts(path, str(folder), problem.message, problem.hint or _ANOTHER)


def _read(folder: Path, path: str) -> AdapterFacts:
    shown_as = model_files.place(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "is not there"
        raise ModelError(f"{shown_as} {what}.", "Name the folder of an adapter, a checkpoint, or a run.")
    if not (folder / model_files.ADAPTER).is_file():
        whole = (folder / "config.json").is_file()
        raise ModelError(
            f"{shown_as} holds no {model_files.ADAPTER}{', but a whole model' if whole else ''}.",
            "Name it as model.name." if whole else "Name the folder of an adapter, a checkpoint, or a run.",
        )
    model_files.refuse_what_it_names(folder)
    model_files.refuse_pickled_adapter(folder)
    content = model_files.read_json(folder / model_files.ADAPTER)
    where = model_files.place(folder / model_files.ADAPTER)
    if not isinstance(content, dict):
        raise ModelError(f"{where}: holds no settings.", _ANOTHER)
    _refuse_others(content, where)
    tensors = model_files.header(folder / model_files.ADAPTER_WEIGHTS)
    base, settings = content.get("base_model_name_or_path"), _settings(content, where)
    _refuse_another_rank(tensors, settings, where)
    return AdapterFacts(
        path,
        str(folder.absolute()),
        settings=settings,
        base=base if isinstance(base, str) else "",
        weights=len(tensors),
        linears=tuple(sorted(set(_linears(tensors)))),
    )


def _refuse_others(content: Mapping[str, Any], where: str) -> None:
    """Raises ModelError for an adapter that is no LoRA, or one with settings that nothing here stands for."""
    if content.get("peft_type") != "LORA":
        raise ModelError(
            f"{where}: describes {shown(content.get('peft_type'))}, and LoRA is trained further here.", _ANOTHER
        )
    start = content.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_TAKE_FROM_THE_BASE):
        raise ModelError(
            f"{where}: began as {shown(start)}, which takes a part out of the base model, so it fits no other.",
            "Save it as plain LoRA (PEFT: path_initial_model_for_weight_conversion).",
        )
    known = {spec.name for spec in OF_THE_FOLDER}
    for name, value in content.items():
        if name in known or name in _PASSED_OVER or value in (None, False, "", [], {}):
            continue
        raise ModelError(
            f"{where}: has {visible(str(name))[:60]}: {shown(value)}, for which there is no setting.", _ANOTHER
        )


def _settings(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of `adapter` by their names, held to their bounds."""
    content, found = _layers_as_layers(content), dict[str, Any]()
    heads = _HEADS.get(str(content.get("task_type")), set())
    for spec in OF_THE_FOLDER:
        value = content.get(spec.name)
        if spec.name == "modules_to_save" and isinstance(value, list):
            value = [name for name in value if name not in heads]
        if value is None:
            if spec.name in ("r", "lora_alpha"):
                raise ModelError(f"{where}: does not say {spec.name}.", _ANOTHER)
            value = [] if spec.name.startswith(("target_", "modules_")) else spec.default
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            value = sorted(value)
        spec = spec.for_kind("lora")
        if isinstance(fitting := fit(spec, value), Uncoerced):
            raise ModelError(f"{where}: {spec.name} must be {expectation(spec)}; got {shown(value)}.", _ANOTHER)
        found[spec.name] = fitting
    return found


def _layers_as_layers(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with layers that `engine.models.layer_names` had named by their weights as targets again."""
    modules, weights = content.get("target_modules"), content.get("target_parameters")
    if not isinstance(weights, list) or not (isinstance(modules, list) or modules is None):
        return content
    layers = [name.removesuffix(".weight") for name in weights if isinstance(name, str) and name.endswith(".weight")]
    kept = [name for name in weights if not isinstance(name, str) or not name.endswith(".weight")]
    return {**content, "target_modules": [*(modules or ()), *layers], "target_parameters": kept}


def _refuse_another_rank(tensors: Mapping[str, model_files.Tensor], settings: Mapping[str, Any], where: str) -> None:
    """Raises ModelError where the matrices have another rank than is said of them. Those of experts hold one rank for each."""
    for name, tensor in tensors.items() if not settings["target_parameters"] else ():
        if name.endswith(".lora_A.weight") and len(tensor.shape) == 2 and tensor.shape[0] != settings["r"]:
            raise ModelError(
                f"{where}: r is {settings['r']}, and {visible(name)} has rank {tensor.shape[0]}.",
                "The two are not of one adapter: copy or save it again.",
            )


def _linears(tensors: Mapping[str, model_files.Tensor]) -> Iterator[tuple[str, int, int]]:
    """Name, inputs and outputs of each layer that has both matrices in the file, by their shapes: (r, in) and (out, r)."""
    for name, first in tensors.items():
        path, found, rest = name.partition(".lora_A.")
        second = tensors.get(f"{path}.lora_B.{rest}") if found else None
        if second is not None and len(first.shape) == 2 and len(second.shape) == 2:
            yield path.rpartition(".")[2], first.shape[1], second.shape[0]
