"""A model whose weights are shared out by FSDP2 (DTensors): what is told of it, and its checkpoints by torch DCP.

A sharded checkpoint is safetensors: each rank writes the shards that it holds, `weights/shard-*.safetensors` of full weights
and `optimizer/shard-*.safetensors` of the optimizer's states, with where they belong in their headers. Any number of ranks
reads it, one process without a group too. Nothing in it is a pickle but what `torch.load` reads as tensors and numbers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from engine import model_files
from engine.compat.shard_files import ShardWriter
from engine.compat.staging import local
from engine.errors import WorkbenchError, visible
from engine.features.built import base_model
from engine.models.expert_shards import share_of
from engine.models.restore_weights import as_held
from engine.run.process import host

OPTIMIZER_FOLDER = "optimizer"
GROUPS = "param_groups.pt"
OPTIMIZER = "optimizer.pt"
"""transformers' name of the file of an optimizer that one process saved."""


class RankFailure(RuntimeError):
    """A rank could not write its shares."""

    def __init__(self, rank: int, problem: BaseException) -> None:
        super().__init__(f"{place_of(rank)} could not write its shares: {type(problem).__name__}: {problem}")
        self.rank = rank


class RankDiskFailure(OSError):
    """What a rank's disk said when its shares were to be written."""

    def __init__(self, rank: int, problem: OSError) -> None:
        super().__init__(problem.errno, problem.strerror, problem.filename)
        self.rank = rank


def place_of(rank: int) -> str:
    """A rank, and the machine that it is on."""
    alone = int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return f"rank {rank} on {host() if alone else f'node {rank // local}'}"


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether the weights are shared out; those that a forward pass has put together are no shares until they are let go."""
    shared = any(isinstance(module, FSDPModule) for module in model.modules())
    return shared or any(isinstance(weight, DTensor) for weight in model.parameters())


def full_tensor(weight: torch.Tensor) -> torch.Tensor:
    """The whole weight, on every rank. All ranks call it together."""
    if (share := share_of(weight)) is not None:
        return share.together(weight)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _own_class(model: torch.nn.Module) -> type:
    """The model's class, without that which fully_shard puts before it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def shares(model: torch.nn.Module) -> tuple[int, int, int, int]:
    """Of all weights: how many are DTensors, how many there are, the numbers that this rank holds, and all numbers."""
    weights = list(model.parameters())
    split = sum(isinstance(weight, DTensor) for weight in weights)
    return split, len(weights), sum(local(weight).numel() for weight in weights), sum(w.numel() for w in weights)


def mesh(model: torch.nn.Module) -> tuple[int, int]:
    """How many replicas there are of each share, and how many shares of each weight; (1, 1) where none is a share."""
    meshes = (weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor))
    *replicas, shares = next((each.shape for each in meshes), (1,))
    return (replicas[0] if replicas else 1), shares


def adapter_weights(model: PeftModel) -> dict[str, torch.Tensor]:
    """The trained weights whole, on the host, by the model's names: an adapter is small. All ranks call it together."""
    return {
        name: full_tensor(weight).detach().cpu() for name, weight in model.named_parameters() if weight.requires_grad
    }


def take_adapter(model: PeftModel, stored: dict[str, torch.Tensor]) -> None:
    """Gives the trained weights, sharded or not, the values of an adapter's file, by PEFT's names."""
    from peft.utils import get_peft_model_state_dict

    names = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    # What PEFT calls each weight in a file: it names what it is given.
    places = {key: name for name in names for key in get_peft_model_state_dict(model, {name: names[name]})}
    if wrong := sorted(places.keys() ^ stored.keys()):
        raise WorkbenchError(f"the adapter's file does not fit the model: {visible(wrong[0])} ({len(wrong)} in all).")
    with torch.no_grad():
        for key, value in stored.items():
            _fill(names[places[key]], value)


def _fill(weight: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a whole value into a weight, or its share of it into a share."""
    weight.copy_(_shared_out(value.to(weight.dtype), weight))


def _shared_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole value as `like` is held: its share of it where that is a share."""
    value = value.to(like.device)
    if (share := share_of(like)) is not None:
        return share.of(value)
    if not isinstance(like, DTensor):
        return value
    # On a mesh of GPUs it comes to lie on one, also where the shares are in main memory.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to(local(like).device)


def restore_weights(model: torch.nn.Module, folder: Path) -> None:
    """Gives the model the weights of a checkpoint, where one of the two is sharded. Raises WorkbenchError where they do not
    fit."""
    model_files.refuse_what_it_names(folder)
    if isinstance(model, PeftModel):
        model_files.refuse_pickled_adapter(folder)
        take_adapter(model, load_file(folder / model_files.ADAPTER_WEIGHTS))
    elif (folder / model_files.SHARES).is_dir():
        load_weights(model, folder)
    else:
        take_weights(model, folder)


def take_weights(model: torch.nn.Module, folder: Path) -> None:
    """Gives a sharded model the weights that one process has saved: a file at a time where it holds them as the model does,
    else through the model's own loading, on the first process alone."""
    state, seen = _named(model), set()
    if not set(model_files.stored_weights(folder)) <= state.keys():
        _take_converted(model, state, folder)
        return
    with torch.no_grad():
        for file in model_files.weight_files(folder):
            for name, value in load_file(file).items():
                if name in state:
                    _fill(state[name], value)
                    seen.add(name)
    if lacking := sorted(state.keys() - seen):
        raise _misfit(folder, lacking)


def _take_converted(model: torch.nn.Module, state: dict[str, torch.Tensor], folder: Path) -> None:
    """The weights of files that hold them in other pieces, such as each expert by itself; all ranks call it together."""
    found: dict[str, torch.Tensor] = {}
    wrong: list[list[str]] = [[]]
    if dist.get_rank() == 0:
        inner = base_model(model)
        found, missing, unknown = as_held(inner, folder, _own_class(inner))
        wrong = [[*missing, *unknown, *sorted(state.keys() - found.keys())]]
    dist.broadcast_object_list(wrong)
    if wrong[0]:
        raise _misfit(folder, wrong[0])
    with torch.no_grad():
        for name, weight in state.items():
            value = found[name] if found else torch.empty(weight.shape)
            value = value.to(local(weight).device, weight.dtype)
            if isinstance(weight, DTensor):
                given = distribute_tensor(value, weight.device_mesh, weight.placements)
                weight.copy_(given.to(local(weight).device))
            else:
                dist.broadcast(value, 0)
                weight.copy_(value)


def _misfit(folder: Path, names: list[str]) -> WorkbenchError:
    return WorkbenchError(
        f"{folder.name}: does not fit the model: {visible(names[0])} ({len(names)} in all), so training could not go on "
        "as it was.",
        "Merge it into a folder, and start a new run from that as model.name.",
    )


def _save(state: dict[str, torch.Tensor], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Raises OSError where a rank could not write, RuntimeError for another failure of one."""
    # The writer makes the folder itself, where all ranks hear of one that could not.
    try:
        dcp.save(dict(state), storage_writer=ShardWriter(folder), process_group=group)
    except CheckpointException as problem:
        # No Exception: nobody who reports what went wrong would hear of it.
        raise _of_a_rank(problem) from problem


def _of_a_rank(problem: CheckpointException) -> RankDiskFailure | RankFailure:
    """What failed on the first rank that names a cause, its disk before anything else."""
    failures = sorted(problem.failures.items(), key=lambda each: (not isinstance(each[1][0], OSError), each[0]))
    rank, (first, _) = failures[0]
    if isinstance(first, OSError) and first.errno is not None:
        return RankDiskFailure(rank, first)
    return RankFailure(rank, first)


def _load(state: dict[str, torch.Tensor], folder: Path) -> None:
    alone = not torch.distributed.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)


def _stored(folder: Path) -> dict[str, Any]:
    """What a sharded folder holds, by name: size and dtype."""
    return dict(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def _named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's weights and buffers that are kept, each tied one once; a part of the experts as a share of all."""
    weights = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - weights.keys()
    named = {name: value for name, value in model.state_dict().items() if name not in tied}
    for name, value in named.items():
        if (share := None if name not in weights else share_of(weights[name])) is not None:
            named[name] = share.as_dtensor(value)
    return named


def save_weights(model: PreTrainedModel, into: Path) -> None:
    """Each rank's shares of the full weights. All ranks call it together."""
    _save(_named(model), into / model_files.SHARES)


def states(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What a checkpoint holds in shares, by the folder and the name in it: full weights and the optimizer's states."""
    weights = {f"{model_files.SHARES}/{name}": value for name, value in _named(model).items()}
    return weights | {
        f"{OPTIMIZER_FOLDER}/{name}": value for name, value in _optimizer_states(optimizer, model).items()
    }


def save_states(states: dict[str, torch.Tensor], into: Path, group: dist.ProcessGroup) -> None:
    """Writes them as `save_weights` and `save_optimizer` do. All ranks call it together."""
    for folder in (model_files.SHARES, OPTIMIZER_FOLDER):
        begins = f"{folder}/"
        own = {name.removeprefix(begins): value for name, value in states.items() if name.startswith(begins)}
        _save(own, into / folder, group)


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Gives the model, sharded or not, the weights of a sharded checkpoint. Raises WorkbenchError where they do not fit."""
    state, stored = _named(model), _stored(folder / model_files.SHARES)
    if wrong := sorted(state.keys() ^ stored.keys()):
        raise _misfit(folder, wrong)
    with torch.no_grad():
        _load(state, folder / model_files.SHARES)


def save_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, into: Path, *, first: bool) -> None:
    """Each rank's shares of the optimizer's states; the first writes what its groups say. All ranks call it together."""
    _save(_optimizer_states(optimizer, model), into / OPTIMIZER_FOLDER)
    if first:
        save_groups(optimizer, into)


def _optimizer_states(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        share = share_of(weight)
        for key, value in optimizer.state.get(weight, {}).items():
            of_experts = share is not None and _like(value, weight.shape)
            found[f"{name}.{key}"] = share.as_dtensor(value) if share is not None and of_experts else value
    return found


def full_optim_states(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state as one process that holds all experts would save it. All ranks call it together."""
    saved: dict[str, Any] = optimizer.state_dict()
    for weight, number in _numbered(optimizer, saved):
        share = share_of(weight)
        if share is not None and (state := saved["state"].get(number)):
            saved["state"][number] = {
                key: share.together(value).cpu() if _like(value, weight.shape) else value
                for key, value in state.items()
            }
    return saved


def take_states(optimizer: Any, saved: dict[str, Any]) -> None:
    """Gives an optimizer of some experts the states of all of them: its part."""
    for weight, number in _numbered(optimizer, saved):
        share = share_of(weight)
        if share is not None and (state := saved["state"].get(number)):
            wanted = share.full_shape(weight)
            saved["state"][number] = {
                key: share.of(value) if _like(value, wanted) else value for key, value in state.items()
            }
    optimizer.load_state_dict(saved)


def _numbered(optimizer: Any, saved: dict[str, Any]) -> Iterator[tuple[torch.Tensor, int]]:
    """Each weight of an optimizer with its number in what it saves."""
    for group, stored in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        yield from zip(group["params"], stored["params"], strict=True)


def _like(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shape


def save_groups(optimizer: torch.optim.Optimizer, into: Path) -> None:
    """What the optimizer's groups say: learning rates and the like."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    torch.save(groups, into / GROUPS)


def load_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, folder: Path) -> None:
    """Gives the optimizer, its weights sharded or not, the states of a sharded checkpoint."""
    state: dict[str, torch.Tensor] = {}
    found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    weights = dict(model.named_parameters())
    groups_of = {weight: group for group in optimizer.param_groups for weight in group["params"]}
    for path, stored in _stored(folder / OPTIMIZER_FOLDER).items():
        name, _, key = path.rpartition(".")
        weight, dtype = weights[name], stored.properties.dtype
        like = stored.size == weight.shape
        share = share_of(weight)
        if share is not None and not share.inmost and stored.size == share.full_shape(weight):
            part = share.as_dtensor(torch.empty_like(weight, dtype=dtype))
            state[path], found.setdefault(weight, {})[key] = part, local(part)
            continue
        where = _of_steps(groups_of.get(weight, {}), weight)
        state[path] = (
            torch.empty_like(weight, dtype=dtype) if like else torch.empty(stored.size, dtype=dtype, device=where)
        )
        found.setdefault(weight, {})[key] = state[path]
    _load(state, folder / OPTIMIZER_FOLDER)
    for trained, values in found.items():
        if (share := share_of(trained)) is not None:
            wanted = share.full_shape(trained)
            found[trained] = {
                key: _shared_out(each, trained) if _like(each, wanted) else each for key, each in values.items()
            }
    optimizer.state.update(found)
    groups = torch.load(folder / GROUPS, weights_only=True)
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        group.update(stored)


def _of_steps(group: dict[str, Any], weight: torch.Tensor) -> torch.device:
    """Where an optimizer counts a weight's steps: beside it where its kernel reads them, as torch's own loading has it."""
    beside = group.get("fused") or group.get("capturable")
    return local(weight).device if beside else torch.device("cpu")


def take_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, folder: Path) -> None:
    """Gives an optimizer of shares the states that one process has saved."""
    saved = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    for group, stored in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for weight, number in zip(group["params"], stored["params"], strict=True):
            for key, value in saved["state"].get(number, {}).items():
                same = isinstance(value, torch.Tensor) and value.shape == weight.shape
                other = value.to(_of_steps(group, weight)) if isinstance(value, torch.Tensor) else value
                optimizer.state[weight][key] = _shared_out(value, weight) if same else other
        group.update({key: value for key, value in stored.items() if key != "params"})


def holds_shards(folder: Path) -> bool:
    """Whether a checkpoint's optimizer was written in shares."""
    return (folder / OPTIMIZER_FOLDER).is_dir()


def save_settings(model: torch.nn.Module, into: Path) -> None:
    """The model's config beside the shards, as `save_pretrained` writes it."""
    inner = base_model(model)
    inner.config.architectures = [_own_class(inner).__name__]
    inner.config.save_pretrained(into)
    if (generation := getattr(inner, "generation_config", None)) is not None:
        generation.save_pretrained(into)
