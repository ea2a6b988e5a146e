"""Adapters on experts that are one weight, written as one adapter for each expert, and read back in plain torch.

PEFT keeps such an adapter as two matrices for all experts together, which other readers take for something else. Here each
expert's gate, up and down have their own, named as the base's files name the experts' weights where they hold them one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine import model_files
from engine.config.tree import RunConfig
from engine.errors import ModelError, WorkbenchError, visible
from engine.export.merge import DTYPES, PREFIX, Plan, plan, write_safetensors
from engine.export.parity import differs, trained_base
from engine.export.stored import is_turned

READER = "plain torch, expert by expert"
PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": None, "w2": None}
"""Names of an expert's projections, and which half of gate and up each is."""


@dataclass(frozen=True)
class Single:
    """The adapter of one expert's projection."""

    path: str
    """What it is cut from, in the plan's `wrapped`."""
    expert: int
    rows: slice
    """Its outputs among those of what it is cut from."""


def refuse_without_experts(adapter: Path) -> None:
    """Raises WorkbenchError for an adapter without experts, or one whose experts differ in rank or alpha."""
    settings = model_files.read_json(adapter / model_files.ADAPTER)
    if not settings.get("target_parameters"):
        raise _without_experts()
    if settings.get("rank_pattern") or settings.get("alpha_pattern"):
        raise WorkbenchError(
            "--per-expert: the adapter's rank or alpha differs from layer to layer (rank_pattern, alpha_pattern).",
            "Export it as it is: leave --per-expert out.",
        )


def _without_experts() -> WorkbenchError:
    return WorkbenchError(
        "--per-expert: this adapter is on no experts that are one weight (adapter.target_parameters).",
        "Export it as it is: leave --per-expert out.",
    )


@dataclass(frozen=True)
class PerExpert:
    """An adapter in the checkpoint `adapter`, cut into one for each expert."""

    adapter: Path
    plan: Plan
    singles: dict[str, Single]
    """By the names of the projections."""

    @classmethod
    def of(cls, config: RunConfig, base: Path, adapter: Path) -> PerExpert:
        """Raises ModelError for experts that are laid out in an unknown way, WorkbenchError where there are none."""
        made = plan(config, base, adapter, merging=False)
        if not (singles := dict(_singles(made))):
            raise _without_experts()
        return cls(adapter, made, singles)

    @property
    def one_by_one(self) -> bool:
        """Whether the base's files hold the experts one by one, so that the names are theirs."""
        held = {path for path, share in self.plan.shares.values() if share.expert is not None}
        return {each.path for each in self.singles.values()} <= held

    def write(self, into: Path) -> None:
        """adapter_model.safetensors and adapter_config.json, a weight at a time."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        with safe_open(self.adapter / model_files.ADAPTER_WEIGHTS, "pt") as weights:
            cut = {key for each in self.singles.values() for key in self.plan.low_rank[each.path].values()}
            whole = [key for key in weights.keys() if key not in cut]  # noqa: SIM118 - no mapping
            shapes = {}
            for key in whole:
                part = weights.get_slice(key)
                shapes[key] = model_files.Tensor(part.get_dtype(), tuple(part.get_shape()))
            for stem, each in self.singles.items():
                for key, value in zip(_keys(stem), _factors(self.plan, each, weights), strict=True):
                    shapes[key] = model_files.Tensor(names[value.dtype], tuple(value.shape))

            def tensors() -> Iterator[torch.Tensor]:
                yield from map(weights.get_tensor, whole)
                for each in self.singles.values():
                    yield from _factors(self.plan, each, weights)

            write_safetensors(into / model_files.ADAPTER_WEIGHTS, shapes, tensors())
        settings = _settings(model_files.read_json(self.adapter / model_files.ADAPTER), self.plan, self.singles)
        (into / model_files.ADAPTER).write_text(json.dumps(settings, indent=2) + "\n", "utf-8")

    @torch.no_grad()
    def compare(self, folder: Path) -> int:
        """How many weights of experts are in `folder`, each of which adds what PEFT's own layer adds. Raises ParityError."""
        scale = _scale(folder)
        with (
            safe_open(self.adapter / model_files.ADAPTER_WEIGHTS, "pt") as weights,
            safe_open(folder / model_files.ADAPTER_WEIGHTS, "pt") as written,
        ):
            for path in {each.path for each in self.singles.values()}:
                whole = self.plan.delta(path, weights)
                largest = float(whole.abs().max())
                for stem, each in ((stem, each) for stem, each in self.singles.items() if each.path == path):
                    a, b = (written.get_tensor(key).float() for key in _keys(stem))
                    wanted = whole[each.expert][each.rows]
                    if not float((scale * (b @ a) - wanted).abs().max()) <= 1e-5 * largest:
                        raise differs(READER, f"{visible(stem)} adds something else than the trained adapter")
        return len(self.singles)


def _keys(stem: str) -> tuple[str, str]:
    return f"{PREFIX}{stem}.lora_A.weight", f"{PREFIX}{stem}.lora_B.weight"


def _scale(folder: Path) -> float:
    settings = model_files.read_json(folder / model_files.ADAPTER)
    return float(settings["lora_alpha"] / settings["r"])


def _singles(made: Plan) -> Iterator[tuple[str, Single]]:
    """The names of what is written and what each is."""
    for path, layer in made.wrapped.items():
        owner, leaf = path.replace(".base_layer", ""), layer.parameter_name
        if layer.get_param().dim() == 2:
            continue  # a router's weight: its adapter is that of any layer
        held = [(name, share) for name, (of, share) in made.shares.items() if of == path]
        if held and all(share.expert is not None for _, share in held):
            for name, share in held:
                assert share.expert is not None
                yield name.removesuffix(".weight"), Single(path, share.expert, share.rows)
            continue
        module: Any = layer.get_base_layer()
        if not hasattr(module, "is_transposed") or leaf not in ("gate_up_proj", "up_proj", "down_proj"):
            raise ModelError(
                f"{visible(owner)}.{visible(leaf)}: how this weight holds gate, up and down is not known, so it is not written "
                "expert by expert.",
                "Leave --per-expert out, or export the merged model (--to safetensors).",
            )
        rows = {leaf: slice(None)}
        if leaf == "gate_up_proj":
            rows = dict(zip(("gate_proj", "up_proj"), _halves(module, int(layer.out_features or 0)), strict=True))
        for expert in range(int(layer.num_experts)):
            for name, those in rows.items():
                yield f"{owner}.{expert}.{name}", Single(path, expert, those)


def _halves(module: Any, outputs: int) -> tuple[slice, slice]:
    """The rows of gate and those of up."""
    if getattr(module, "is_concatenated", True):
        return slice(0, outputs // 2), slice(outputs // 2, outputs)
    return slice(0, outputs, 2), slice(1, outputs, 2)


def _factors(made: Plan, single: Single, weights: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A [r, in] and B [out, r] of one projection."""
    lora = made.factors(single.path, weights)
    return lora.a[single.expert], lora.b[single.expert, single.rows].contiguous()


def _settings(content: dict[str, Any], made: Plan, singles: dict[str, Single]) -> dict[str, Any]:
    """The adapter's config without target_parameters; the scale as alpha / r, which all readers know."""
    routers = [path for path, layer in made.wrapped.items() if layer.get_param().dim() == 2]
    names = {each.rpartition(".")[2] for each in (*made.layers, *routers, *singles)}
    if content.get("use_rslora"):
        alpha = content["lora_alpha"] * sqrt(content["r"])
        content |= {"use_rslora": False, "lora_alpha": int(alpha) if alpha.is_integer() else alpha}
    return content | {"target_parameters": None, "target_modules": sorted(names)}


@torch.no_grad()
def open_again(config: RunConfig, base: Path, folder: Path) -> Any:
    """The base with what is in `folder` added to its weights in float32, W + alpha / r * B A, as its names say, without PEFT.

    Raises ParityError for a name that has no place in the model.
    """
    model = trained_base(config, base, adapted=True)
    scale = _scale(folder)
    experts = {
        name.rpartition(".")[0]: None
        for name, weight in model.named_parameters()
        if weight.dim() == 3 and name.endswith(("gate_up_proj", "up_proj", "down_proj"))
    }
    with safe_open(folder / model_files.ADAPTER_WEIGHTS, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            stem, _, last = key.removeprefix(PREFIX).partition(".lora_")
            if last in ("A.weight", "embedding_A"):
                other = key.removesuffix(last) + last.replace("A", "B")
                delta = scale * (file.get_tensor(other).float() @ file.get_tensor(key).float())
                _weight(model, stem, experts).add_(delta.mT if last == "embedding_A" else delta)
            elif not last:
                stem = stem.replace(".base_layer", "").replace(".modules_to_save.default", "")
                owner, _, leaf = stem.rpartition(".")
                # another parameter, where the base's would be that of a tied layer too
                setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(file.get_tensor(key).float()))
    return model


def _weight(model: torch.nn.Module, stem: str, experts: Mapping[str, None]) -> torch.Tensor:
    """The model's weight [out, in] of a layer, or of one expert: a view of the one that holds them all."""
    found = re.fullmatch(r"(.*)\.(\d+)\.(\w+)", stem)
    if found and found[3] in PARTS and (owner := _same_layer(found[1], experts)):
        expert, half = int(found[2]), PARTS[found[3]]
        module = model.get_submodule(owner)
        leaf = "down_proj" if half is None else "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"
        weight: torch.Tensor = getattr(module, leaf).data[expert]
        weight = weight.mT if is_turned(model, f"{owner}.{leaf}") else weight
        return weight if half is None or leaf == "up_proj" else weight[_halves(module, len(weight))[half]]
    try:
        return model.get_parameter(f"{stem}.weight").data
    except AttributeError:
        raise differs(READER, f"{visible(stem)} is no layer of the model") from None


def _same_layer(path: str, experts: Mapping[str, None]) -> str:
    """The model's experts that files call `path`, which may be another name of the same layer; empty where there are none."""
    layer = re.compile(r"\.\d+(?=\.|$)")
    there = [each for each in experts if layer.findall(each) == layer.findall(path)]
    return path if path in experts else there[0] if len(there) == 1 else ""
