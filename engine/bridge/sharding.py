"""FSDP's and DeepSpeed's settings in other tools' files: what shares a model out over GPUs there, and what does it here.

Here `distributed.strategy: auto` chooses, once `run.devices` says how many GPUs there are: DDP where the model fits into each
of them, torch's FSDP2 where it does not. A step is the same to rounding, so a file asks for nothing that must be written but for
where shares lie, how many groups hold the model and over how many devices rows are divided.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.bridge.keys import (
    BY_HAND,
    OFF,
    Answer,
    File,
    Key,
    Part,
    anything,
    changed,
    mapped,
    needless,
    nothing,
    unsupported,
)
from engine.config.renames import is_off
from engine.errors import visible

LARGEST_FILE = 1 << 20
"""Bytes of a DeepSpeed file that is read."""
_WHOLE = changed({}, "With run.devices above 1 and distributed.strategy: ddp each GPU holds the whole model.")
_OFFLOAD = changed(
    {},
    "With run.devices above 1 distributed.cpu_offload: true keeps each GPU's share of weights, gradients and optimizer states in "
    "main memory; memory.layer_offloading keeps frozen weights there on one GPU too.",
)
_REPLICAS = changed(
    {},
    "distributed.dp_replicate_size says how many groups hold the model each, here in shares over the devices of a group; as many "
    "as distributed.nodes is one a machine.",
)
_MESSAGES = nothing("How weights are put together and let go of is torch's FSDP2's own affair.")
_LAYERS = nothing("Each decoder layer is put together by itself.")
_ONE_FOLDER = changed(
    {}, "A checkpoint holds each device's share as safetensors; `workbench merge RUN` makes one model folder of them."
)


def _shared(file: File, *, kept: bool = False) -> Answer:
    """What answers a model that is shared out; with `kept` its weights stay whole between the passes."""
    if _in_eight_bits(file):
        return changed(
            {},
            "With run.devices above 1 each GPU holds the model in 8 bits whole: a share lacks its scales; one of nf4 has them.",
        )
    words = (
        "torch's FSDP2 does it here: with run.devices above 1 distributed.strategy, auto by itself, shares the model out where "
        "it does not fit into each GPU; the steps are the same to rounding."
    )
    return changed(
        {}, f"{words} distributed.reshard_after_forward: false keeps its weights between the passes." if kept else words
    )


def _in_eight_bits(file: File) -> bool:
    return file.on("load_in_8bit") or str(file.get("quantization_bit")) == "8"


def _strategy(value: Any, file: File) -> Answer:
    """FSDP1's words for what is shared, alone or in a list, with the words beside them."""
    named = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "true": "full_shard"}
    words = value if isinstance(value, list) else str(value).replace(",", " ").split()
    asked = {named.get(str(word).lower(), str(word).lower()) for word in words} - {"auto_wrap"}
    known: dict[str, Answer] = {
        "offload": _OFFLOAD,
        "hybrid_shard": _REPLICAS,
        "hybrid_shard_zero2": _REPLICAS,
        "shard_grad_op": _shared(file, kept=True),
        "full_shard": _shared(file),
        "no_shard": _WHOLE,
    }
    if odd := asked - known.keys():
        return unsupported(f"{visible(min(odd))[:40]} is no strategy that is known here: {BY_HAND}")
    return next((answer for word, answer in known.items() if word in asked), needless(OFF))


def _offload(value: Any, file: File) -> Answer:
    return needless(OFF) if is_off(value) else _OFFLOAD


def _state_dict(value: Any, file: File) -> Answer:
    return _ONE_FOLDER if "FULL" in str(value).upper() else needless("So is a checkpoint here.")


def _reshard(value: Any, file: File) -> Answer:
    if isinstance(value, str) and not is_off(value) and value.lower() not in ("true", "yes"):
        return _strategy(value, file)
    return _shared(file, kept=True) if is_off(value) else needless("So it is here where memory is short.")


_FSDP: dict[str, Key] = {
    "version": nothing("It is torch's FSDP2 here."),
    "sharding_strategy": Key(_strategy),
    "reshard_after_forward": Key(_reshard),
    "offload_params": Key(_offload),
    "cpu_offload": Key(_offload),
    "state_dict_type": Key(_state_dict),
    "activation_checkpointing": anything({"memory.gradient_checkpointing": True}),
    "mixed_precision_policy": nothing("model.dtype says it."),
    **dict.fromkeys(
        ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "min_num_params"), _LAYERS
    ),
    **dict.fromkeys(
        ("limit_all_gathers", "sync_module_states", "use_orig_params", "forward_prefetch", "backward_prefetch",
         "backward_prefetch_policy", "cpu_ram_efficient_loading"),
        _MESSAGES,
    ),
}  # fmt: skip


def _fsdp_settings(value: Any, file: File) -> Answer | list[Part]:
    if not isinstance(value, Mapping):
        return needless(OFF) if is_off(value) else unsupported(f"Its settings stand in a file of their own: {BY_HAND}")
    return _inner(value, _FSDP, file, "fsdp_")


def _inner(section: Mapping[str, Any], table: Mapping[str, Key], file: File, prefix: str = "") -> list[Part]:
    """A row for each key of a mapping, by its table."""
    parts: list[Part] = []
    for name, value in section.items():
        known = table.get(str(name).removeprefix(prefix))
        if known is None:
            parts.append((str(name), value, unsupported(f"It is not known here: {BY_HAND}")))
        elif value is None:
            parts.append((str(name), value, needless(OFF)))
        else:
            answer = known.means(value, file)
            parts += [(f"{name}.{more}", item, answered) for more, item, answered in answer] if isinstance(answer, list) else [
                (str(name), value, answer)
            ]  # fmt: skip
    return parts


def _unless_auto(means: Key) -> Key:
    """DeepSpeed's `auto` is what the rest of the file says."""
    return Key(
        lambda value, file: needless("The config's own stands.") if value == "auto" else means.means(value, file)
    )


def _set(path: str) -> Key:
    return _unless_auto(Key(lambda value, file: mapped({path: value})))


def _section(table: Mapping[str, Key], otherwise: Key | None = None) -> Key:
    def means(value: Any, file: File) -> Answer | list[Part]:
        if not isinstance(value, Mapping):
            return unsupported(f"Settings stand there, no single value: {BY_HAND}")
        known = table if otherwise is None else {**dict.fromkeys(map(str, value), otherwise), **table}
        return _inner(value, known, file)

    return Key(means)


def _precision(dtype: str) -> Key:
    on = Key(lambda value, file: needless(OFF) if is_off(value) else mapped({"model.dtype": dtype}))
    return _section({"enabled": _unless_auto(on)}, nothing("Losses are scaled by torch's own scaler."))


def _stage(value: Any, file: File) -> Answer:
    if value not in (0, 1, 2, 3):
        return unsupported(f"It is no stage that is known here: {BY_HAND}")
    return _WHOLE if value == 0 else _shared(file, kept=value < 3)


_DEVICE = _section(
    {"device": Key(lambda value, file: needless(OFF) if str(value).lower() == "none" else _OFFLOAD)},
    nothing("It counts with weights in main memory."),
)
_TOLD = nothing("A run's curves, log and receipt show what it does.")
_OWN = "DeepSpeed's own section is not read: optim.optim and optim.lr_scheduler_type say it here."
_DEEPSPEED: dict[str, Key] = {
    "zero_optimization": _section(
        {"stage": Key(_stage), "offload_optimizer": _DEVICE, "offload_param": _DEVICE}, _MESSAGES
    ),
    "bf16": _precision("bfloat16"),
    "fp16": _precision("float16"),
    "train_micro_batch_size_per_gpu": _set("optim.per_device_train_batch_size"),
    "gradient_accumulation_steps": _set("optim.gradient_accumulation_steps"),
    "gradient_clipping": _set("optim.max_grad_norm"),
    "train_batch_size": nothing("It follows from the batch of a device, the accumulation and run.devices."),
    "optimizer": _unless_auto(Key(lambda value, file: unsupported(_OWN))),
    "scheduler": _unless_auto(Key(lambda value, file: unsupported(_OWN))),
    "activation_checkpointing": nothing("memory.gradient_checkpointing says it."),
    **dict.fromkeys(
        ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type"), _MESSAGES
    ),
    **dict.fromkeys(("steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown"), _TOLD),
}


def _deepspeed(value: Any, file: File) -> Answer | list[Part]:
    """The settings, which stand in the file or in one that it names."""
    if isinstance(value, Mapping):
        return _inner(value, _DEEPSPEED, file)
    if is_off(value):
        return needless(OFF)
    name = str(value)
    place = file.resolve_path(name)
    if place is None:
        stage = re.search(r"z(?:ero)?[_-]?([0-3])", name.rpartition("/")[2].lower())
        if stage is None or "offload" in name.lower():
            return unsupported(f"The file is not here, so nothing was taken from it: {BY_HAND}")
        answer = _stage(int(stage[1]), file)
        return changed({}, f"The file is not here; by its name it is of stage {stage[1]}. {answer.reason}")
    try:
        if not place.is_file() or place.stat().st_size > LARGEST_FILE:
            raise ValueError
        document = json.loads(place.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, Mapping):
        return unsupported(f"It is no JSON file of DeepSpeed's settings: {BY_HAND}")
    return [("", name, needless("Its settings are the rows below.")), *_inner(document, _DEEPSPEED, file)]


def ring_of(file: File) -> int:
    """Over how many devices the file divides the tokens of a row; 1 where it does not."""
    asked = [file.get(key, 1) for key in ("context_parallel_size", "sequence_parallel_degree")]
    return max((size for size in asked if type(size) is int), default=1)


def _sizes(value: Any, file: File) -> Answer:
    """Over how many devices a model is shared out, how many hold it so, and how many divide a row; together they say how many
    devices there are."""
    return sizes(value, file, file.get("dp_shard_size", 1), file.get("dp_replicate_size", 1), ring_of(file))


def sizes(value: Any, file: File, shares: Any, replicas: Any, ring: Any) -> Answer:
    """What the sizes of a mesh mean here. Those who divide a row hold shares of the model too, as with accelerate."""
    if not all(type(size) is int and size > 0 for size in (shares, replicas, ring)):
        return needless(OFF) if is_off(value) else unsupported(f"It is known as a number above 0 here: {BY_HAND}")
    divided = {"distributed.context_parallel_size": ring} if ring > 1 else {}
    if shares == 1:
        if value == 1:
            return needless(OFF)
        return changed(
            {**divided, "run.devices": replicas * ring}, "Each device holds the whole model." + _RING[ring > 1]
        )
    if _in_eight_bits(file):
        return _shared(file)
    meshed = {"distributed.dp_replicate_size": replicas, "distributed.dp_shard_size": shares * ring, **divided}
    why = "The sizes say how many devices there are, which run.devices says here; of several machines, of each."
    return changed({**meshed, "run.devices": shares * replicas * ring}, why + _RING[ring > 1])


_RING = {False: "", True: " Rows are divided by a ring of torch's own attention, unpacked."}


def _mesh(value: Any, file: File) -> Answer | list[Part]:
    """accelerate's ParallelismConfig."""
    if not isinstance(value, Mapping):
        return needless(OFF) if is_off(value) else unsupported(f"Sizes stand there by name: {BY_HAND}")
    shares, replicas, ring = (value.get(key) or 1 for key in ("dp_shard_size", "dp_replicate_size", "cp_size"))
    rows: list[Part] = []
    for name, size in value.items():
        if name in ("dp_shard_size", "dp_replicate_size", "cp_size"):
            rows.append((str(name), size, sizes(size, file, shares, replicas, ring)))
        elif name in ("cp_backend", "cp_handler", "sp_backend", "sp_handler", "tp_handler"):
            rows.append((str(name), size, needless("How the ring sends is torch's own affair.")))
        else:
            none = size in (None, 1)
            rows.append(
                (str(name), size, needless(OFF) if none else unsupported("Tensor parallelism is not here yet."))
            )
    return rows


KEYS: dict[str, Key] = {
    "fsdp": Key(lambda value, file: needless(OFF) if is_off(value) else _strategy(value, file)),
    "fsdp_config": Key(_fsdp_settings),
    "deepspeed": Key(_deepspeed),
    "parallelism_config": Key(_mesh),
}
"""What transformers' arguments, and so TRL's, LLaMA-Factory's and Axolotl's files have."""
AXOLOTL: dict[str, Key] = {
    **KEYS,
    **dict.fromkeys(
        ("dp_shard_size", "dp_replicate_size", "context_parallel_size", "sequence_parallel_degree"), Key(_sizes)
    ),
    "fsdp_version": nothing("It is torch's FSDP2 here."),
    "fsdp_final_state_dict_type": Key(_state_dict),
}
