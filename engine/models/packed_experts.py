"""Loading a model whose experts are packed into few bits one at a time, or are in few bits in its files and stay so.

Linear layers beside them are bitsandbytes', or as they are beside MXFP4 and NVFP4. transformers hands an experts' weight to a
quantizer when all experts of the layer are together in 16 bits; bitsandbytes' quantizers in transformers leave such weights as
they are. Here each expert is read from its file, brought into the model's layout by the model's own conversions and packed before
the next is read: above the packed numbers there is one expert. What files hold in MXFP4 (`quant_method: mxfp4`, as gpt-oss is
published) or FP8 (`quant_method: fp8`, as DeepSeek-V3 is) is taken byte by byte and never widened; transformers would widen it to
16 bits, or compute it by kernels without gradients.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

import torch
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin, QuantizationMethod

from engine.errors import ModelError
from engine.kernels.experts.module import unserved
from engine.kernels.experts.packed import PackedExperts, Packer, of_fp8, of_mxfp4
from engine.models.stored_fp8 import fitting

PROJECTIONS = ("gate_up_proj", "down_proj")
_BY = "workbench_{}bit_with_experts"
_PART = "experts_part"
_ALONE = "workbench_experts_alone"
_BYTES = {"mxfp4": 4.25 / 8, "nvfp4": 4.5 / 8, "fp8": 1.0}
_MOVES = "MergeModulelist", "Concatenate", "Transpose", "_AsStored"
"""Conversions that put scales where they put the numbers."""


def with_experts(asked: BitsAndBytesConfig, part: tuple[int, int] = (0, 1)) -> BitsAndBytesConfig:
    """The same settings for the quantizer that packs experts too; `part`: those of one process, its place and the number of
    parts."""
    asked.quant_method = _BY.format(4 if asked.load_in_4bit else 8)  # type: ignore[assignment]  # any name is registered
    if part != (0, 1):
        setattr(asked, _PART, part)
    return asked


class ExpertsAlone(QuantizationConfigMixin):
    """What `from_pretrained` does about experts in few bits: `pack` plain ones, `keep` them as the files hold them, or `widen`
    what the files hold so; or it may `divide` plain ones. All else is loaded as it is, and
    transformers then knows the model as a plain one. `block`: rows and columns of one scale of what files hold in FP8, None for
    one a matrix. `part`: this process's place and the number of parts; it reads and packs its own experts alone."""

    def __init__(
        self,
        todo: Literal["pack", "keep", "widen", "divide"] = "pack",
        kind: str = "mxfp4",
        block: tuple[int, int] | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.quant_method = _ALONE  # type: ignore[assignment]  # any name is registered
        self.todo, self.kind, self.block, self.part = todo, kind, block, part


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
        ours = [self._one_by_one(conversion) for conversion in known]
        # Weights that lie in the file as the model holds them.
        as_stored = [self._converter(f".experts.{end}") for end in sorted(ends)]
        return [conversion for conversion in conversions if conversion not in known] + ours + as_stored

    def _one_by_one(self, known: WeightConverter) -> _OneByOne:
        return _OneByOne.of(known)

    def _converter(self, name: str) -> _OneByOne:
        return _OneByOne(name, name, [_AsStored()])

    def _changes_experts(self) -> bool:
        """Whether a pass of ours must compute them."""
        return True

    def _process_model_before_weight_loading(self, model: PreTrainedModel, device_map: Any = None, **more: Any) -> None:
        self._ends: set[str] = set()
        for name, weight in model.named_parameters():
            if ".experts." in name and weight.dim() == 3:
                if self._changes_experts():
                    _refuse(model.get_submodule(name.rpartition(".")[0]), _is_experts(model, name))
                self._ends.add(name.rpartition(".experts.")[2])
        super()._process_model_before_weight_loading(model, device_map=device_map, **more)


class _BesideBitsAndBytes(_PacksExperts):
    def __init__(self, asked: BitsAndBytesConfig, **more: Any) -> None:
        asked.quant_method = QuantizationMethod.BITS_AND_BYTES  # what transformers, PEFT and TRL know such a model by
        super().__init__(asked, **more)

    def get_quantize_ops(self) -> ConversionOps:
        asked: Any = self.quantization_config
        kind = asked.bnb_4bit_quant_type if asked.load_in_4bit else "int8"
        return _Pack(super().get_quantize_ops(), kind, getattr(asked, _PART, (0, 1)))


@register_quantizer(_BY.format(4))
class _FourBits(_BesideBitsAndBytes, Bnb4BitHfQuantizer):
    pass


@register_quantizer(_BY.format(8))
class _EightBits(_BesideBitsAndBytes, Bnb8BitHfQuantizer):
    pass


@register_quantizer(_ALONE)
class _ExpertsAlone(_PacksExperts):
    """Does what `ExpertsAlone` says."""

    quantization_config: ExpertsAlone
    is_trainable = True

    def is_serializable(self) -> bool:
        return False

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        asked = self.quantization_config
        if not self.param_needs_quantization(model, param_name):
            return param.element_size()
        wide = asked.todo in ("divide", "widen")
        return (param.element_size() if wide else _BYTES[asked.kind]) / asked.part[1]

    def get_quantize_ops(self) -> ConversionOps:
        asked = self.quantization_config
        return _Divide(asked.part) if asked.todo == "divide" else _Pack(None, asked.kind, asked.part)

    def _changes_experts(self) -> bool:
        return self.quantization_config.todo != "divide"

    def postprocess_model(self, model: PreTrainedModel, **more: Any) -> None:
        self.remove_quantization_config(model)

    def _one_by_one(self, known: WeightConverter) -> _OneByOne:
        return _InFp8.of(known) if self._in_fp8() else super()._one_by_one(known)

    def _in_fp8(self) -> bool:
        return self.quantization_config.todo == "keep" and self.quantization_config.kind == "fp8"

    def _converter(self, name: str) -> _OneByOne:
        if self._in_fp8():
            return _InFp8.of(super()._converter(name))
        if self.quantization_config.todo in ("pack", "divide"):
            return super()._converter(name)
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


def refuse_unserved(module: torch.nn.Module, name: str) -> None:
    """Raises ModelError for experts, whose weight has this name, that no pass of ours computes packed."""
    leaf = name.rpartition(".")[2]
    _refuse(module, leaf in PROJECTIONS and hasattr(module, "is_transposed"))


def converted(
    known: WeightConverter, found: dict[str, Any], layer_name: str, like: torch.Tensor, config: PreTrainedConfig | None
) -> torch.Tensor:
    """What a model's conversion makes of the parts of one expert, by the entries of the files that they are of."""
    own = _OneByOne.of(known)
    return own._converted(found, list(found), layer_name, like[:1], config)


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
        sources = cls._sources(list(other._original_source_patterns))
        converter = cls(sources, list(other._original_target_patterns), list(other.operations))
        converter.scope_prefix, converter.base_model_prefix = other.scope_prefix, other.base_model_prefix
        return converter

    @staticmethod
    def _sources(names: list[str]) -> list[str]:
        """The entries of the files that are read, by those that the plain conversion reads."""
        return names

    def _converted(
        self,
        found: dict[str, Any],
        sources: list[str],
        layer_name: str,
        like: torch.Tensor,
        config: PreTrainedConfig | None,
    ) -> torch.Tensor:
        """The conversion of one expert's parts, by the entries that they are of; some look at a weight `like` it to see
        whether the file has it turned."""
        alone = SimpleNamespace(get_parameter=lambda name: like)
        for operation in self.operations:
            found = operation.convert(
                found, source_patterns=sources, target_patterns=self.target_patterns, full_layer_name=layer_name,
                model=alone, config=config, missing_keys=None,
            )  # fmt: skip
        (made,) = found.values()
        part: torch.Tensor = made[0] if isinstance(made, list) else made
        return part[0] if part.dim() == 3 else part

    def convert(
        self,
        layer_name: str,
        model: PreTrainedModel | None = None,
        config: PreTrainedConfig | None = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Any]:
        """The packed weight by its name, or what the plain conversion makes of a weight that is not to be packed."""
        if self.quantization_operation is None:
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        read = {key: [_Reader(job) for job in jobs] for key, jobs in self.collected_tensors.items()}
        assert model is not None
        count, *sides = model.get_parameter(layer_name).shape
        like = torch.empty(1, *sides, device="meta")

        def expert(number: int) -> torch.Tensor:
            parts: dict[str, Any] = {key: [_part(readers, count, number)] for key, readers in read.items()}
            return self._converted(parts, self.source_patterns, layer_name, like, config)

        given = {layer_name: _Experts(count, expert)}
        return self.quantization_operation.convert(given, self.source_patterns, self.target_patterns, model=model)


def _place(model: PreTrainedModel | None, name: str) -> tuple[torch.nn.Parameter, bool]:
    """The model's weight of experts of this name, and whether it lies turned."""
    assert model is not None
    return model.get_parameter(name), bool(model.get_submodule(name.rpartition(".")[0]).is_transposed)


class _InBlocks(_OneByOne):
    """Takes the bytes and scales of all experts as the files hold them, or what they stand for."""

    __slots__ = ()

    def convert(
        self,
        layer_name: str,
        model: PreTrainedModel | None = None,
        config: PreTrainedConfig | None = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Any]:
        """The weight by its name. Raises ModelError for bytes that are not those of the model's weight."""
        weight, turned = _place(model, layer_name)
        own = _own(weight.shape[0], hf_quantizer.quantization_config.part)
        found = {
            key.rpartition("_")[2]: _Reader(job).as_stored(own).to(torch.uint8)
            for key, jobs in self.collected_tensors.items()
            for job in jobs
        }
        wanted = len(own), *weight.shape[1:]
        try:
            packed = of_mxfp4(found["blocks"], found["scales"], weight.dtype, turned=turned)
        except KeyError as lacking:
            raise ModelError(f"model.name: its files hold no {layer_name}_{lacking.args[0]}.") from lacking
        except ValueError as problem:
            raise ModelError(f"model.name: {layer_name} cannot be read: {problem}.") from problem
        if packed.shape != wanted:
            has, needs = (" x ".join(map(str, shape)) for shape in (packed.shape, wanted))
            raise ModelError(f"model.name: {layer_name} in MXFP4 has the shape {has}, and {needs} is wanted.")
        if hf_quantizer.quantization_config.todo == "widen":
            return {layer_name: packed.all_unpacked().contiguous()}
        return {layer_name: torch.nn.Parameter(packed, requires_grad=False)}


class _InFp8(_OneByOne):
    """Takes numbers and scales of all experts as the files hold them."""

    __slots__ = ()

    @staticmethod
    def _sources(names: list[str]) -> list[str]:
        """Scales first: older transformers take the first name that a key begins with."""
        return [f"{name}{end}" for end in ("_scale_inv", "_scale") for name in names] + names

    def convert(
        self,
        layer_name: str,
        model: PreTrainedModel | None = None,
        config: PreTrainedConfig | None = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Any]:
        """The weight by its name. Raises ModelError for numbers without scales, or in another format or layout."""
        for operation in self.operations:
            if (name := type(operation).__name__) not in _MOVES:
                _refuse_packing(layer_name, f"{name} of transformers moves numbers, and not their scales")
        wide = [name for name in self.source_patterns if not name.endswith(("_scale_inv", "_scale"))]
        read = {name: [_Reader(job) for job in self.collected_tensors.get(name, ())] for name in wide}
        scaled = {
            name: [
                _Reader(job) for end in ("_scale_inv", "_scale") for job in self.collected_tensors.get(name + end, ())
            ]
            for name in wide
        }
        weight, turned = _place(model, layer_name)
        lies = [type(each).__name__ for each in self.operations] != ["_AsStored"] and turned
        like = torch.empty(1, *weight.shape[1:], device="meta")
        numbers = scales = None
        count = weight.shape[0]
        own = _own(count, hf_quantizer.quantization_config.part)
        for expert in own:
            parts = {}
            for name in wide:
                part = _part(read[name], count, expert, torch.Tensor.contiguous)
                if part.dtype != torch.float8_e4m3fn:
                    _refuse_packing(layer_name, f"its files hold it in {str(part.dtype).removeprefix('torch.')}")
                scale = _part(scaled[name], count, expert, torch.Tensor.float) if scaled[name] else None
                part = part[0] if part.dim() == 3 else part
                scale = scale[0] if scale is not None and scale.dim() == 3 else scale
                parts[name] = part, *fitting(layer_name, part.shape, scale, hf_quantizer.quantization_config.block)
            columns = {block[1] for _, _, block in parts.values()}
            if len(columns) > 1:
                _refuse_packing(layer_name, "parts of it have scales of blocks of other sizes")
            rows = _common(parts.values())
            codes = {name: [part.view(torch.uint8)] for name, (part, _, _) in parts.items()}
            by_block = {
                name: [scale.repeat_interleave(block[0] // rows, 0)[: -(-len(part) // rows)]]
                for name, (part, scale, block) in parts.items()
            }
            made = [self._converted(each, wide, layer_name, like, config) for each in (codes, by_block)]
            if numbers is None or scales is None:
                numbers, scales = (each.new_empty(len(own), *each.shape) for each in made)
                block = (columns.pop(), rows) if lies else (rows, columns.pop())
            numbers[expert - own.start], scales[expert - own.start] = made
        assert numbers is not None
        assert scales is not None
        try:
            packed = of_fp8(numbers.view(torch.float8_e4m3fn), scales, block, weight.dtype)
        except ValueError as problem:
            raise ModelError(f"model.name: {layer_name} cannot be read: {problem}.") from problem
        if packed.shape != (wanted := (len(own), *weight.shape[1:])):
            has, needs = (" x ".join(map(str, shape)) for shape in (packed.shape, wanted))
            raise ModelError(f"model.name: {layer_name} in FP8 has the shape {has}, and {needs} is wanted.")
        return {layer_name: torch.nn.Parameter(packed, requires_grad=False)}


def _common(parts: Iterable[tuple[torch.Tensor, torch.Tensor, tuple[int, int]]]) -> int:
    """Rows of one scale of parts that are put under each other: fewer than a block has where one of them is cut off."""
    every = list(parts)
    sizes = [block[0] for _, _, block in every]
    if len(every) > 1:
        sizes += [len(part) for part, _, _ in every]
    return math.gcd(*sizes)


def _refuse_packing(name: str, reason: str) -> NoReturn:
    raise ModelError(
        f"model.quantize_moe_experts: {name} cannot stay in FP8: {reason}.", "Set model.quantize_moe_experts to false."
    ).mended_by({"model.quantize_moe_experts": False})


class _Reader:
    """One entry of the files, not read yet."""

    def __init__(self, job: Any) -> None:
        self.job = job
        captured = inspect.getclosurevars(job).nonlocals if callable(job) else {}
        self.told = captured if captured.keys() >= {"tensor", "device", "dtype"} else None

    def as_stored(self, own: range | None = None) -> torch.Tensor:
        """The entry in the files' own format; of one that holds all experts these alone, the others unread."""
        if self.told is None:
            return self.materialize() if own is None else self.materialize()[own.start : own.stop]
        value: torch.Tensor = self.told["tensor"][...] if own is None else self.told["tensor"][own.start : own.stop]
        return value.to(device=self.told["device"])

    def materialize(self) -> torch.Tensor:
        value: torch.Tensor = self.job() if callable(self.job) else self.job.result()
        return value

    def one(self, number: int, stored: bool = False) -> torch.Tensor:
        """Of an entry that holds all experts [E, ...] this one, [1, ...], the others unread; as `stored`, or in the model's
        format."""
        if self.told is not None:
            part: torch.Tensor = self.told["tensor"][number : number + 1]
            return part.to(device=self.told["device"], dtype=None if stored else self.told["dtype"])
        return self.materialize()[number : number + 1]


def _part(
    readers: list[_Reader], count: int, number: int, stored: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """One expert's part in the model's format, or what `stored` makes of it in the files'."""
    if len(readers) == count:
        return readers[number].materialize() if stored is None else stored(readers[number].as_stored())
    if len(readers) == 1:
        found = readers[0].one(number, stored is not None)
        return found if stored is None else stored(found)
    raise ValueError(f"the files hold {len(readers)} of a layer's {count} experts")


def _own(count: int, part: tuple[int, int]) -> range:
    """The experts of one process; all of them where they do not divide, which is refused once the model is there."""
    place, parts = part
    held = count // parts
    return range(place * held, (place + 1) * held) if count % parts == 0 else range(count)


class _Pack(ConversionOps):
    """Packs one process's experts one after the other; leaves linear layers to bitsandbytes' own operation, if it is there."""

    def __init__(self, of_linears: ConversionOps | None, kind: str, part: tuple[int, int]) -> None:
        self.of_linears, self.kind, self.part = of_linears, kind, part

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
            # Blocks of four bits lie along what goes in, whichever way the model holds its experts.
            turned = self.kind in ("mxfp4", "nvfp4") and model.get_submodule(name.rpartition(".")[0]).is_transposed
            own = _own(value.count, self.part)
            packer = Packer(len(own), self.kind, model.get_parameter(name).dtype, turned=turned)
            for number in own:
                packer.add(value.read(number))
            found[name] = torch.nn.Parameter(packer.done(), requires_grad=False)
        return found


class _Divide(ConversionOps):
    """Reads the experts of one process, and leaves those of the others in the files."""

    def __init__(self, part: tuple[int, int]) -> None:
        self.part = part

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **more: Any
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in input_dict.items():
            like = more["model"].get_parameter(name)
            numbers = _own(value.count, self.part)
            first_one = value.read(numbers.start)
            whole = first_one.new_empty(len(numbers), *first_one.shape, dtype=like.dtype)
            whole[0] = first_one
            for number in numbers[1:]:
                whole[number - numbers.start] = value.read(number)
            found[name] = torch.nn.Parameter(whole, requires_grad=like.requires_grad)
        return found
