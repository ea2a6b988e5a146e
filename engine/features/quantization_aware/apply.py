"""`kernels.quantization_aware`: the linear layers of a run compute with FP8 products, or with int8 rounding in place.

The one door for both, in every method: `fp8` has torchao's Float8Linear compute a layer's products in eight bits, `true`
its FakeQuantizedLinear round weights and inputs to int8 and pass gradients straight through, but where a number is
clipped. A model takes one kind only. The weights stay the model's own parameters, so checkpoints hold plain numbers that
need no torchao. Heads, routers and adapters compute as before; a reference copy rounds as the policy does, or the two
would differ before the first step. torchao itself replaces two templates of torch's compiler when it converts to FP8
(equal numbers, around a fault in Triton); that is the library's and stays.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.config.facts import Facts
from engine.config.tree import RunConfig
from engine.errors import ModelError
from engine.features import quantization_aware
from engine.features.applied import Applied
from engine.features.built import Built, cards_here
from engine.features.feature import refuse

FEATURE = "quantization-aware"
MULTIPLE = 16
"""FP8 products want both sizes of a weight to be a multiple of this."""
_HEADS = {"lm_head", "score", "classifier", "embed_out"}
_ROUTERS = {"gate", "router"}
_TURN_OFF = "Set kernels.quantization_aware to false."
_OFF = {"kernels.quantization_aware": False}
_CLASSES = {"fp8": "Float8Linear", "int8": "FakeQuantizedLinear"}
Place = tuple[torch.nn.Module, str, torch.nn.Linear]


def apply(config: RunConfig, built: Built, *, emulate: bool = False) -> Applied | None:
    """Converts the linear layers of every model of the trainer; None where it was not asked for.

    `emulate` computes FP8 products in float32 from the rounded numbers, on any device: for tests. Raises ModelError for
    a value that is neither kind, a machine or package that lacks it, and a model with nothing to convert.
    """
    asked = config.kernels.quantization_aware
    if asked is False:
        return None
    kind = "int8" if asked is True else asked
    if kind not in _CLASSES or (kind == "int8") != (asked is True):
        raise ModelError(
            f"kernels.quantization_aware: must be false, true or fp8; got {asked!r}.", "true rounds to int8."
        )
    models = list(built.models())
    _refuse_a_second_kind(models)
    if kind == "int8" and not _bounds_pass_gradients():
        raise ModelError(
            f"kernels.quantization_aware: must be false or fp8 with torch {torch.__version__}; got true. Its clamp gives what lies on "
            "a bound no gradient, and torchao's rounding puts the least and greatest number of each token there.",
            "Install torch below 2.15, or set kernels.quantization_aware to false.",
        ).mended_by(_OFF)
    if kind == "fp8" and not emulate:
        refuse(quantization_aware, config, cards_here(built.device), machine_alone=True)
    places, left_out = _places(models, MULTIPLE if kind == "fp8" else 1)
    if not places:
        raise ModelError(
            f"kernels.quantization_aware: the model has no plain linear layers that could be computed in {kind}.",
            _TURN_OFF,
        ).mended_by(_OFF)
    recipe = config.kernels.fp8_recipe_name
    try:
        convert = _to_float8(recipe, emulate) if kind == "fp8" else _to_fake_int8()
    except ImportError:
        refuse(quantization_aware, config, Facts(packages={"torchao": None}), machine_alone=True)
        raise
    undo = _swap(models, places, convert)
    trained = sum(module.weight.requires_grad for _, _, module in places)
    words = _fp8_summary(recipe, trained, len(places)) if kind == "fp8" else _INT8_WORDS
    detail = f"linear layers{_left_out(left_out)}; {words}; saved weights are plain"
    how = f"fp8, {recipe}" if kind == "fp8" else "int8 fake quantization"
    return Applied(FEATURE, asked, f"{how} (torchao)", len(places), detail, undo)


def _bounds_pass_gradients() -> bool:
    """Whether a number on a bound of torch's `clamp` gets its gradient, as it did before torch 2.15."""
    number = torch.ones((), requires_grad=True)
    (gradient,) = torch.autograd.grad(number.clamp(-1, 1), number)
    return gradient.item() == 1


_INT8_WORDS = (
    "weights rounded per row, inputs per token, gradients pass straight through what is not clipped; products stay in "
    "the model's format"
)


def _fp8_summary(recipe: str, trained: int, count: int) -> str:
    scales = "one scale for a tensor" if recipe == "tensorwise" else "one scale for a row"
    if trained == 0:
        return f"frozen weights: forward products and input gradients in fp8, {scales}; adapters as they are"
    frozen = f"; {count - trained} are frozen and have no weight gradient" if trained < count else ""
    return f"forward products, input and weight gradients in fp8, {scales}{frozen}"


def _left_out(left_out: Counter[str]) -> str:
    if not left_out:
        return ""
    return f"; left out: {', '.join(f'{count} {what}' for what, count in sorted(left_out.items()))}"


def _places(models: list[torch.nn.Module], multiple: int) -> tuple[list[Place], Counter[str]]:
    """Where a plain linear layer stands, as (parent, name, layer), and how many were left out and why."""
    found: dict[int, Place] = {}
    left_out: Counter[str] = Counter()
    seen: set[int] = set()
    for model in models:
        heads = {id(part.get_output_embeddings()) for part in model.modules() if isinstance(part, PreTrainedModel)}
        for path, module in model.named_modules():
            if type(module) is not torch.nn.Linear or id(module) in seen:
                continue
            seen.add(id(module))
            reason = "head" if id(module) in heads else _reason(path, module, multiple)
            if reason:
                left_out[reason] += 1
            else:
                parent, _, name = path.rpartition(".")
                found[id(module)] = (model.get_submodule(parent), name, module)
    return list(found.values()), left_out


def _reason(path: str, module: torch.nn.Linear, multiple: int) -> str | None:
    parts = path.split(".")
    if any(part.startswith("lora_") for part in parts):
        return "of adapters"
    if _HEADS & set(parts):
        return "head"
    if parts[-1] in _ROUTERS:
        return "router"
    if any(size % multiple for size in module.weight.shape):
        return f"of sizes that are no multiple of {multiple}"
    return None


def _refuse_a_second_kind(models: list[torch.nn.Module]) -> None:
    for model in models:
        for module in model.modules():
            if (name := type(module).__name__) in _CLASSES.values():
                raise ModelError(
                    f"kernels.quantization_aware: the model's layers are {name} already, and a model takes one kind "
                    "of rounding, once."
                )


Convert = Callable[[torch.nn.Module, Callable[[torch.nn.Module, str], bool]], Any]


def _to_float8(recipe: str, emulate: bool) -> Convert:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # a batch's tokens are the inner size of the weight gradient's product, and no multiple of 16
    settings = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True, emulate=emulate)
    return lambda model, chosen: convert_to_float8_training(model, module_filter_fn=chosen, config=settings)


def _to_fake_int8() -> Convert:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    inputs = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True)
    settings = QATConfig(activation_config=inputs, weight_config=weights, step="prepare")
    return lambda model, chosen: quantize_(model, settings, filter_fn=chosen)


def _swap(models: list[torch.nn.Module], places: list[Place], convert: Convert) -> Callable[[], None]:
    """Has torchao put its layers in these places, with the same parameters; returns the undo."""
    chosen = {id(module) for _, _, module in places}
    for model in models:
        convert(model, lambda module, _: id(module) in chosen)
    for parent, name, module in places:
        parent.get_submodule(name).train(module.training)

    def undo() -> None:
        for parent, name, module in places:
            # what the run did to the layer's parameters since stays
            now: Any = parent.get_submodule(name)
            module.weight, module.bias = now.weight, now.bias
            setattr(parent, name, module.train(now.training))

    return undo
