"""accelerate's FSDP2 where it has none: on a CPU it makes DDP of it and says nothing. The one way past that.

On GPUs nothing is done there: accelerate takes the plugin of the arguments itself. And weights that stay together for many
passes, for what samples. accelerate shares a head out together with the norm before it, whose pass puts both together; in a
model with an adapter it does not find that norm, and a head that is read without its own pass would stay a share.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp_utils
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule


def without_mesh_on_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """An accelerator's own arguments: on a CPU without sizes of a mesh, which it refuses there; `take_on_cpu` takes them."""
    if not torch.cuda.is_available():
        arguments.pop("parallelism_config", None)
    return arguments


def take_on_cpu(accelerator: Accelerator, arguments: Mapping[str, Any], sizes: ParallelismConfig | None) -> bool:
    """Has this accelerator shard as it would on GPUs, by the arguments of accelerate's plugin and the sizes of the mesh;
    whether that was needed. Its state is that of all accelerators of the process."""
    state = accelerator.state
    if state.distributed_type != DistributedType.MULTI_CPU:
        return False
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**arguments)
    state.parallelism_config = sizes
    state.device_mesh = None if sizes is None else sizes.get_device_mesh("cpu")
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return True


def shard_heads_with_norms(accelerator: Accelerator) -> None:
    """Has this accelerator find the last norm of a model with an adapter as it finds that of a model without."""
    find = getattr(fsdp_utils, "_find_final_norm", None)
    if find is None:  # before 1.15 heads were shared out with the whole model, whose pass puts them together
        return
    prepare = accelerator._prepare_fsdp2

    def norm_of(model: torch.nn.Module) -> torch.nn.Module | None:
        return find(model.get_base_model() if isinstance(model, PeftModel) else model)

    def prepared(*args: Any) -> Any:
        fsdp_utils._find_final_norm = norm_of
        try:
            found = prepare(*args)
        finally:
            fsdp_utils._find_final_norm = find
        for each in found:
            if isinstance(each, torch.nn.Module):
                begin_passes_anew(each)
        return found

    accelerator._prepare_fsdp2 = prepared


def begin_passes_anew(model: torch.nn.Module) -> None:
    """Has each pass of a sharded model put together the modules that were shared out as one. torch 2.11 does so at the first of
    them once all have run, or after a backward pass; where a loss reads the head's weight the head never runs, and a training
    pass after an evaluation and a save would meet shares of the embeddings. Nothing with releases that end passes themselves."""
    states: list[Any] = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    if all(hasattr(state, "_force_complete_incomplete_states") for state in states):  # and where nothing is sharded
        return

    def begin(*_: Any) -> None:
        for state in states:
            state._modules_to_run_forward.clear()

    model.register_forward_pre_hook(begin, prepend=True)


def wrap_what_is_there(accelerator: Accelerator, model: torch.nn.Module, apart: Collection[str] = ()) -> None:
    """Has accelerate put a model together by those layers that transformers names and the model has: a class of models that
    see names layers of images for its text model, too, and accelerate ends with a ValueError for each that is not there.
    Modules below the paths `apart` stay whole on each process."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or plugin.transformer_cls_names_to_wrap is not None:
        return
    whole = re.compile("|".join(rf"(?:.*\.)?{re.escape(path)}" for path in apart)) if apart else None
    inside = re.compile(rf"(?:{whole.pattern})(?:\..*)?") if whole is not None else None
    there = {
        type(module).__name__ for name, module in model.named_modules() if inside is None or not inside.fullmatch(name)
    }
    plugin.transformer_cls_names_to_wrap = sorted(there & set(getattr(model, "_no_split_modules", None) or ()))
    if whole is not None:
        plugin.ignored_modules = whole.pattern


@contextlib.contextmanager
def kept_together(model: torch.nn.Module) -> Iterator[None]:
    """Within it a model's layers, once put together by their first pass, stay so: the passes after it need no message, and
    each rank may make as many as it likes. The whole model is on each rank meanwhile. Nothing for one that is not sharded."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    before = [_reshards(module) for module in modules]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module, reshards in zip(modules, before, strict=True):
            module.reshard()
            module.set_reshard_after_forward(reshards, recurse=False)


def reshards(model: torch.nn.Module) -> bool:
    """Whether a sharded model's layers are let go of after their forward pass."""
    return any(_reshards(module) for module in model.modules() if isinstance(module, FSDPModule))


def _reshards(module: FSDPModule) -> bool:
    """Whether a module lets go of its weights after a forward pass; torch has a way to set it and none to ask."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(group is not None and group.post_forward_mesh_info is not None for group in groups)
