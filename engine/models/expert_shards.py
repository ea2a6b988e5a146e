"""Experts that are divided over processes (expert parallelism): which of a layer's experts one holds, and all of them again.

A weight of experts, or of an adapter on them, that holds those of one process alone carries its `Share`. What is written
into a checkpoint is whole, as one process would write it: every other number of processes goes on from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from engine.config.tree import RunConfig
from engine.errors import ModelError
from engine.run.hang import TORCH_SECONDS

if TYPE_CHECKING:
    from peft.tuners.lora.layer import ParamWrapper

PATH = "distributed.expert_parallel_size"
_MARK = "expert_share"


@dataclass(frozen=True)
class Group:
    """The processes that hold all experts between them, seen by one of them. Consecutive ranks, so that those of a machine
    are beside each other."""

    size: int
    rank: int
    ranks: int
    members: dist.ProcessGroup
    copies: dist.ProcessGroup | None = None
    """Those that hold the same experts; None where this one alone does."""

    @property
    def place(self) -> int:
        """Which part of the experts is this process's."""
        return self.rank % self.size

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The processes as torch's mesh: the last dimension divides the experts, one before it has copies of them."""
        every = torch.arange(self.ranks).view(-1, self.size)
        if self.copies is None:
            return DeviceMesh.from_group(self.members, device.type, every[0])
        return DeviceMesh.from_group(
            [self.copies, self.members], device.type, every, mesh_dim_names=("copies", "experts")
        )


@dataclass(frozen=True)
class Share:
    """What a weight has of one that holds all experts. They lie along its first dimension, or `inmost` in its last, as in PEFT's
    `lora_B`."""

    experts: int
    group: Group
    inmost: bool = False

    @property
    def held(self) -> int:
        """How many experts this process holds."""
        return self.experts // self.group.size

    def of(self, whole: Tensor) -> Tensor:
        """This process's part of a weight that holds all experts; a copy."""
        first = self.group.place * self.held
        if self.inmost:
            by_expert = whole.unflatten(-1, (-1, self.experts))
            return by_expert[..., first : first + self.held].flatten(-2).contiguous()
        rows = whole.shape[0] // self.experts
        return whole[first * rows : (first + self.held) * rows].clone()

    def together(self, part: Tensor) -> Tensor:
        """The weight of all experts, on every process; all of the group call it together."""
        part = part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(self.group.size)]
        dist.all_gather(parts, part, group=self.group.members)
        if not self.inmost:
            return torch.cat(parts)
        return torch.cat([each.unflatten(-1, (-1, self.held)) for each in parts], -1).flatten(-2)

    def as_dtensor(self, part: Tensor) -> DTensor:
        """The weight of all experts as torch knows it where each process holds a part, over this part's own memory. torch writes
        and reads its checkpoints by that: no process ever holds all."""
        assert not self.inmost
        mesh = self.group.mesh(part.device)
        return DTensor.from_local(part.detach(), mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)], run_check=False)

    def full_shape(self, part: Tensor) -> torch.Size:
        """The shape of the weight of all experts."""
        sizes = list(part.shape)
        sizes[-1 if self.inmost else 0] *= self.group.size
        return torch.Size(sizes)


def share_of(weight: Tensor) -> Share | None:
    """What a weight has of one that holds all experts; None for any other."""
    found: Share | None = getattr(weight, _MARK, None)
    return found


def is_divided(model: nn.Module) -> bool:
    """Whether processes hold different experts of this model."""
    return any(share_of(weight) is not None for weight in model.parameters())


def full_numel(weight: Tensor) -> int:
    """How many numbers a weight has, those of the experts of other processes too."""
    share = share_of(weight)
    return weight.numel() if share is None else weight.numel() * share.group.size


def part_of(config: RunConfig) -> tuple[int, int] | None:
    """Which part of the experts this process holds, of how many; None where it holds all of them, as a process alone does."""
    size = config.distributed.expert_parallel_size
    if size == 1 or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.get_rank() % size, size


def expert_group(config: RunConfig) -> Group | None:
    """The processes that this one holds the experts with; None where it holds all. All processes call it together: they get
    groups of their own, since messages in the middle of a backward pass must not wait for those that average gradients."""
    part = part_of(config)
    if part is None:
        return None
    size, ranks, rank = part[1], dist.get_world_size(), dist.get_rank()
    patience = timedelta(seconds=config.distributed.ddp_timeout + TORCH_SECONDS)
    blocks = [list(range(first, first + size)) for first in range(0, ranks, size)]
    members = [dist.new_group(block, timeout=patience) for block in blocks]
    copies = None
    if ranks > size:
        alike = [dist.new_group(list(range(place, ranks, size)), timeout=patience) for place in range(size)]
        copies = alike[rank % size]
    return Group(size, rank, ranks, members[rank // size], copies)


class Experts(Protocol):
    """A layer of transformers that holds its experts in one weight."""

    num_experts: int


def divide_experts(model: nn.Module, group: Group) -> None:
    """Leaves each layer of the model the experts of this process. Raises ModelError where it has none, or they do not divide."""
    found = 0
    for module in model.modules():
        # Those of transformers that take a router's choice.
        if not all(hasattr(module, name) for name in ("is_transposed", "num_experts", "down_proj")):
            continue
        layer = cast(Experts, module)
        experts = int(layer.num_experts)
        if experts % group.size:
            raise ModelError(
                f"{PATH}: must divide the {experts} experts of {type(module).__name__}; got {group.size}.",
            ).mended_by({PATH: 1})
        share = Share(experts, group)
        for weight in module.parameters(recurse=False):
            if weight.shape[0] == experts:
                weight.data = share.of(weight.data)
            setattr(weight, _MARK, share)
        layer.num_experts = share.held
        found += 1
    if not found:
        raise ModelError(
            f"{PATH}: must be 1 with {type(model).__name__}; got {group.size}: it has no experts in transformers' form.",
        ).mended_by({PATH: 1})


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Within it an adapter is made as for all experts, so that each process draws the numbers that one alone would draw; after it
    the adapter is this process's. What stands for the experts meanwhile takes no memory."""
    from peft.tuners.lora.layer import ParamWrapper

    put_away: list[tuple[nn.Module, str, nn.Parameter, Share]] = []
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if (share := share_of(weight)) is not None:
                put_away.append((module, name, weight, share))
    for module, name, weight, share in put_away:
        # Of no packed weight: it would be unpacked to be asked.
        stands = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(share.full_shape(weight))
        setattr(module, name, nn.Parameter(stands, requires_grad=weight.requires_grad))
    try:
        yield
    finally:
        held: dict[tuple[int, str], Share] = {}
        for module, name, weight, share in put_away:
            weight.requires_grad_(module.get_parameter(name).requires_grad)
            setattr(module, name, weight)
            held[id(module), name] = share
    for wrapper in [module for module in model.modules() if isinstance(module, ParamWrapper)]:
        if (found := held.get((id(wrapper.get_base_layer()), wrapper.parameter_name))) is not None:
            _divide_adapter(wrapper, found)


def _divide_adapter(wrapper: ParamWrapper, share: Share) -> None:
    for factors, inmost in ((wrapper.lora_A, False), (wrapper.lora_B, True)):
        own = Share(share.experts, share.group, inmost)
        for linear in factors.values():
            assert isinstance(linear, nn.Linear)
            linear.weight.data = own.of(linear.weight.data)
            linear.out_features, linear.in_features = linear.weight.shape
            setattr(linear.weight, _MARK, own)
    wrapper.num_experts = share.held
