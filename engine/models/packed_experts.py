"""Loading a model whose experts are packed into few bits one at a time, or are in MXFP4 in its files and stay so.

Linear layers beside them are bitsandbytes', or as they are beside MXFP4. transformers hands an experts' weight to a quantizer when all experts of the layer are together in 16 bits; bitsandbytes'
quantizers in transformers leave such weights as they are. Here each expert is read from its file, brought into the model's
layout by the model's own conversions and packed before the next is read: above the packed numbers there is one expert.
What files hold in MXFP4 (`quant_method: mxfp4`, as gpt-oss is published) is taken byte by byte and never widened;
transformers would widen it to 16 bits, or compute it by kernels that have no gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import torch
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin, QuantizationMethod

from engine.errors import ModelError
from engine.kernels.experts.module import unserved
from engine.kernels.experts.packed import PackedExperts, Packer, of_mxfp4

PROJECTIONS = ("gate_up_proj", "down_proj")
_BY = "workbench_{}bit_with_experts"
_MXFP4 = "workbench_mxfp4_experts"


def with_experts(asked: BitsAndBytesConfig) -> BitsAndBytesConfig:
    """The same settings for the quantizer that packs experts too."""
    asked.quant_method = _BY.format(4 if asked.load_in_4bit else 8)  # type: ignore[assignment]
    return asked


class Mxfp4Experts(QuantizationConfigMixin):
    """What `from_pretrained` does about experts in MXFP4: `pack` plain ones, `keep` them as the files hold them, or `widen`
    what the files hold so. All else is loaded as it is, and transformers then knows the model as a plain one."""

    def __init__(self, todo: Literal["pack", "keep", "widen"] = "pack") -> None:
        self.quant_method = _MXFP4  # type: ignore[assignment]
        self.todo = todo


def stored_mxfp4(source: str, revision: str | None) -> PreTrainedConfig | None:
    """The config, without its note on quantization, of a model whose files hold experts in MXFP4; None for another. Raises
    OSError or ValueError for a config not to be had."""
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    quantization = getattr(config, "quantization_config", None)
    quantization = quantization if isinstance(quantization, dict) or quantization is None else quantization.to_dict()
    if quantization is None or quantization.get("quant_method") != QuantizationMethod.MXFP4:
        return None
    del config.quantization_config
    return config


def packed_experts(model: torch.nn.Module) -> Iterator[tuple[str, PackedExperts]]:
    """The packed weights of a model by name."""
    return ((name, weight) for name, weight in model.named_parameters() if isinstance(weight, PackedExperts))


class _PacksExperts(HfQuantizer):
    """What all quantizers here do, beside the work of those that they are made from."""

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **more: Any) -> bool:
        of_linears = super().param_needs_quantization(model, param_name, **more)
        return bool(of_linears or _is_experts(model, param_name))

    def update_weight_conversions(self, weight_conversions: list[Any], *model: PreTrainedModel) -> list[Any]:
        conversions = super().update_weight_conversions(weight_conversions, *model)  # an older one tells no model
        ends = self._ends
        known = [
            conversion
            for conversion in conversions
            if isinstance(conversion, WeightConverter) and _makes(conversion, ends)
        ]
        ours = [_OneByOne.of(conversion) for conversion in known]
        # Weights that lie in the file as the model holds them.
        as_stored = [self._whole(f".experts.{end}") for end in sorted(ends)]
        return [conversion for conversion in conversions if conversion not in known] + ours + as_stored

    def _whole(self, name: str) -> _OneByOne:
        return _OneByOne(name, name, [_AsStored()])

    def _process_model_before_weight_loading(self, model: PreTrainedModel, device_map: Any = None, **more: Any) -> None:
        self._ends: set[str] = set()
        for name, weight in model.named_parameters():
            if ".experts." in name and weight.dim() == 3:
                _refuse(model.get_submodule(name.rpartition(".")[0]), _is_experts(model, name))
                self._ends.add(name.rpartition(".experts.")[2])
        super()._process_model_before_weight_loading(model, device_map=device_map, **more)


class _BesideBitsAndBytes(_PacksExperts):
    def __init__(self, asked: BitsAndBytesConfig, **more: Any) -> None:
        asked.quant_method = QuantizationMethod.BITS_AND_BYTES  # what transformers, PEFT and TRL know such a model by
        super().__init__(asked, **more)

    def get_quantize_ops(self) -> ConversionOps:
        asked: Any = self.quantization_config
        return _Pack(super().get_quantize_ops(), asked.bnb_4bit_quant_type if asked.load_in_4bit else "int8")


@register_quantizer(_BY.format(4))
class _FourBits(_BesideBitsAndBytes, Bnb4BitHfQuantizer):
    pass


@register_quantizer(_BY.format(8))
class _EightBits(_BesideBitsAndBytes, Bnb8BitHfQuantizer):
    pass


@register_quantizer(_MXFP4)
class _ExpertsAlone(_PacksExperts):
    """Does what `Mxfp4Experts` says."""

    quantization_config: Mxfp4Experts
    is_trainable = True

    def is_serializable(self) -> bool:
        return False

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        packed = self.quantization_config.todo != "widen" and self.param_needs_quantization(model, param_name)
        return 4.25 / 8 if packed else param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(None, "mxfp4")

    def postprocess_model(self, model: PreTrainedModel, **more: Any) -> None:
        self.remove_quantization_config(model)

    def _whole(self, name: str) -> _OneByOne:
        if self.quantization_config.todo == "pack":
            return super()._whole(name)
        return _InBlocks([f"{name}_blocks", f"{name}_scales"], name, [_AsStored()])


def _is_experts(model: PreTrainedModel, name: str) -> bool:
    """Whether a weight holds all experts of a layer, in a module that our pass may compute."""
    owner, _, leaf = name.rpartition(".")
    if leaf not in PROJECTIONS or not owner:
        return False
    module = model.get_submodule(owner)
    weight = getattr(module, leaf, None)
    return isinstance(weight, torch.Tensor) and weight.dim() == 3 and hasattr(module, "is_transposed")


def _refuse(module: torch.nn.Module, known: bool) -> None:
    """Raises ModelError for experts that no pass of ours computes, since the model's own would unpack all of a layer."""
    reason = unserved(module) if known else "they are laid out in another way than transformers' other experts"
    if reason is not None:
        raise ModelError(
            f"model.quantize_moe_experts: the experts of {type(module).__name__} stay in 16 bits: {reason}.",
            "Set model.quantize_moe_experts to false.",
        ).mended_by({"model.quantize_moe_experts": False})


def _makes(converter: WeightConverter, ends: set[str]) -> bool:
    """Whether this conversion makes the weight of experts, and nothing else."""
    targets = converter.target_patterns
    return len(targets) == 1 and any(targets[0].endswith(f"experts.{end}") for end in ends)


class _Experts:
    """All experts of a layer, to be had one at a time in the model's layout."""

    def __init__(self, count: int, read: Callable[[int], torch.Tensor]) -> None:
        self.count, self.read = count, read


class _AsStored(ConversionOps):
    """Nothing to do."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **more: Any
    ) -> dict[str, Any]:
        (found,) = input_dict.values()
        return {target_patterns[0]: found[0] if isinstance(found, list) else found}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class _OneByOne(WeightConverter):
    """The conversion of a model's experts, for one expert at a time."""

    __slots__ = ()

    @classmethod
    def of(cls, other: WeightConverter) -> _OneByOne:
        converter = cls(
            list(other._original_source_patterns), list(other._original_target_patterns), list(other.operations)
        )
        converter.scope_prefix, converter.base_model_prefix = other.scope_prefix, other.base_model_prefix
        return converter

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Any]:
        """The packed weight by its name, or what the plain conversion makes of a weight that is not to be packed."""
        if self.quantization_operation is None:
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        read = {key: [_Reader(job) for job in jobs] for key, jobs in self.collected_tensors.items()}
        count, *sides = model.get_parameter(layer_name).shape
        # Some conversions look at the weight to see whether the file has it turned.
        alone = SimpleNamespace(get_parameter=lambda name: torch.empty(1, *sides, device="meta"))

        def expert(number: int) -> torch.Tensor:
            parts: dict[str, Any] = {key: [_part(readers, count, number)] for key, readers in read.items()}
            for operation in self.operations:
                parts = operation.convert(
                    parts, source_patterns=self.source_patterns, target_patterns=self.target_patterns,
                    full_layer_name=layer_name, model=alone, config=config, missing_keys=None,
                )  # fmt: skip
            (converted,) = parts.values()
            converted = converted[0] if isinstance(converted, list) else converted
            return converted[0] if converted.dim() == 3 else converted

        given = {layer_name: _Experts(count, expert)}
        return self.quantization_operation.convert(given, self.source_patterns, self.target_patterns, model=model)


class _InBlocks(_OneByOne):
    """Takes the bytes and scales of all experts as the files hold them, or what they stand for."""

    __slots__ = ()

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Any]:
        """The weight by its name. Raises ModelError for bytes that are not those of the model's weight."""
        found = {
            key.rpartition("_")[2]: _Reader(job).as_stored()
            for key, jobs in self.collected_tensors.items()
            for job in jobs
        }
        weight = model.get_parameter(layer_name)
        turned = model.get_submodule(layer_name.rpartition(".")[0]).is_transposed
        try:
            packed = of_mxfp4(found["blocks"], found["scales"], weight.dtype, turned=turned)
        except KeyError as lacking:
            raise ModelError(f"model.name: its files hold no {layer_name}_{lacking.args[0]}.") from lacking
        except ValueError as problem:
            raise ModelError(f"model.name: {layer_name} cannot be read: {problem}.") from problem
        if packed.shape != weight.shape:
            wanted, held = (" x ".join(map(str, tensor.shape)) for tensor in (weight, packed))
            raise ModelError(f"model.name: {layer_name} in MXFP4 has the shape {held}, and {wanted} is wanted.")
        if hf_quantizer.quantization_config.todo == "widen":
            return {layer_name: packed.all_unpacked().contiguous()}
        return {layer_name: torch.nn.Parameter(packed, requires_grad=False)}


class _Reader:
    """One entry of the files, not read yet."""

    def __init__(self, job: Any) -> None:
        self.job = job
        captured = inspect.getclosurevars(job).nonlocals if callable(job) else {}
        self.told = captured if captured.keys() >= {"tensor", "device", "dtype"} else None

    def as_stored(self) -> torch.Tensor:
        """The entry in the files' own format, of 8 bits."""
        if self.told is None:
            return self.whole().to(torch.uint8)
        value: torch.Tensor = self.told["tensor"][...]
        return value.to(device=self.told["device"])

    def whole(self) -> torch.Tensor:
        value: torch.Tensor = self.job() if callable(self.job) else self.job.result()
        return value

    def one(self, number: int) -> torch.Tensor:
        """Of an entry that holds all experts [E, ...] this one, [1, ...], the others unread."""
        if self.told is not None:
            part: torch.Tensor = self.told["tensor"][number : number + 1]
            return part.to(device=self.told["device"], dtype=self.told["dtype"])
        return self.whole()[number : number + 1]


def _part(readers: list[_Reader], count: int, number: int) -> torch.Tensor:
    if len(readers) == count:
        return readers[number].whole()
    if len(readers) == 1:
        return readers[0].one(number)
    raise ValueError(f"the files hold {len(readers)} of a layer's {count} experts")


class _Pack(ConversionOps):
    """Packs experts one after the other; leaves linear layers to bitsandbytes' own operation, if it is there."""

    def __init__(self, of_linears: ConversionOps | None, kind: str) -> None:
        self.of_linears, self.kind = of_linears, kind

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **more: Any
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in input_dict.items():
            if not isinstance(value, _Experts):
                assert self.of_linears is not None
                patterns = {"source_patterns": source_patterns, "target_patterns": target_patterns}
                found |= self.of_linears.convert({name: value}, **patterns, **more)
                continue
            model = more["model"]
            # Blocks of MXFP4 lie along what goes in, whichever way the model holds its experts.
            turned = self.kind == "mxfp4" and model.get_submodule(name.rpartition(".")[0]).is_transposed
            packer = Packer(value.count, self.kind, model.get_parameter(name).dtype, turned=turned)
            for number in range(value.count):
                packer.add(value.read(number))
            found[name] = torch.nn.Parameter(packer.done(), requires_grad=False)
        return found
