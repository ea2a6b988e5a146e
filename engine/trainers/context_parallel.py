"""Rows that several GPUs divide (context parallelism): the parts of a batch, who takes which, and the trainer's share in it.

A row is cut into twice as many equal pieces as there are GPUs in the ring; each takes one from the front and its
counterpart from the back, so that all have as much to attend to. Labels are shifted before the cut and positions go with
their tokens, so whatever computes a token by itself needs to know nothing. To the rest of the trainer each GPU has a batch
of its own with fewer tokens: the loss is a sum over tokens divided by those of all ranks, as it is with DDP.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.data_loader import BatchSamplerShard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from engine.compat.ring_attention import ring_attention
from engine.data.pretokenized import IGNORED
from engine.errors import ModelError
from engine.features.attention_backend import varlen
from engine.features.built import base_model
from engine.models.attention_direction import is_causal_lm
from engine.trainers.run_trainer import RunTrainer
from engine.trainers.stream_loader import Dealt
from engine.trainers.token_counts import WithRows

Batch = dict[str, Any]
_SETTING = "distributed.context_parallel_size"


def part_of(batch: Batch, size: int, place: int) -> Batch:
    """The part of a batch that the GPU at `place` of `size` takes.

    Args:
        batch: `input_ids`, `labels` and `attention_mask`, [B, T] int64, padded on the right.

    Returns:
        The same with `shift_labels` (for each token the label of the one behind it) and `position_ids` (its place in the
        row), each [B, T / size], T padded to a multiple of 2 * size.
    """
    rows, tokens = batch["input_ids"].shape
    more = -tokens % (2 * size)
    labels = F.pad(batch["labels"], (0, more + 1), value=IGNORED)
    whole = {
        "input_ids": F.pad(batch["input_ids"], (0, more)),
        "attention_mask": F.pad(batch["attention_mask"], (0, more)),
        "labels": labels[:, :-1],
        "shift_labels": labels[:, 1:],
        "position_ids": torch.arange(tokens + more).expand(rows, -1),
    }
    return {**batch, **{name: _pieces(value, size, place) for name, value in whole.items()}}


def _pieces(whole: torch.Tensor, size: int, place: int) -> torch.Tensor:
    """Of 2 * size pieces the one at `place` from the front and the one at `place` from the back: [B, T] to [B, T / size]."""
    pieces = whole.chunk(2 * size, dim=1)
    return torch.cat([pieces[place], pieces[2 * size - 1 - place]], dim=1)


@dataclass(frozen=True)
class Ring:
    """The GPUs that divide a row, seen by one of them; consecutive ranks, so that those of a machine are beside each other."""

    size: int
    rank: int
    ranks: int
    mesh: DeviceMesh | None = None

    @property
    def place(self) -> int:
        """Which part of a row is this GPU's."""
        return self.rank % self.size

    def deal(self, loader: Any) -> Any:
        """Has all of a ring read the same rows, and each ring others."""
        share = getattr(loader, "batch_sampler", None)
        if isinstance(share, BatchSamplerShard):
            share.num_processes, share.process_index = self.ranks // self.size, self.rank // self.size
            # One ring alone reads as one process does, with a last batch that may be smaller.
            share.even_batches = share.even_batches and share.num_processes > 1
        return loader

    def attends(self, model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
        """Within it the model attends over the ring."""
        return contextlib.nullcontext() if self.mesh is None else ring_attention(model, self.mesh)


class DividesRows(RunTrainer):
    """Mixed in where a loss is a sum over tokens. Without `divide_rows` nothing is another."""

    ring: Ring | None = None
    sums_tokens = True

    def divide_rows(self, size: int) -> None:
        """From now on rings of so many GPUs take a batch. Raises ModelError where the model or the machine has no ring."""
        model = base_model(self.model)
        if not torch.cuda.is_available():
            raise ModelError(
                f"{_SETTING}: must be 1 without a GPU; got {size}.",
                "gloo, by which processes on a CPU talk, has no ring attention; NCCL has.",
            ).mended_by({_SETTING: 1})
        if (reason := lacking(model)) is not None:
            raise ModelError(f"{_SETTING}: must be 1 with this model; got {size}: {reason}.").mended_by({_SETTING: 1})
        ranks, rank = self.args.world_size, self.args.process_index
        mesh = init_device_mesh("cuda", (ranks // size, size), mesh_dim_names=("batch", "ring"))
        self.divide_in(Ring(size, rank, ranks, mesh["ring"]))

    def divide_in(self, ring: Ring) -> None:
        """Takes this ring."""
        self.ring = ring
        assert isinstance(self.data_collator, WithRows)
        self.data_collator.part = functools.partial(part_of, size=ring.size, place=ring.place)

    def _dealt(self) -> Dealt:
        dealt, ring = super()._dealt(), self.ring
        return dealt if ring is None else Dealt(dealt.batch_size, ring.ranks // ring.size, ring.rank // ring.size)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        return loader if self.ring is None else self.ring.deal(loader)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super().get_eval_dataloader(*args, **kwargs)
        return loader if self.ring is None else self.ring.deal(loader)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._attending():
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._attending():
            return super().prediction_step(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.ring is not None:
            self.gather_function = self._per_ring
        return super().evaluation_loop(*args, **kwargs)

    def _per_ring(self, losses: torch.Tensor) -> torch.Tensor:
        """The losses [rows] of one GPU of each ring, without those of rows that only fill up a last batch."""
        assert self.ring is not None
        state = self.accelerator.gradient_state
        each = self.accelerator.gather(losses).view(-1, self.ring.size, losses.numel())[:, 0].flatten()
        return each[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else each

    def _attending(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.ring is None else self.ring.attends(base_model(self.model))


def lacking(model: PreTrainedModel) -> str | None:
    """Why this model cannot attend in a ring, or None."""
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention"] if getattr(text, "sliding_window", None) else []
    if other := sorted(set(kinds) - {"full_attention"}):
        return f"it has layers of {', '.join(other)}, and a ring sees all tokens before each"
    if not is_causal_lm(model):
        return "a ring looks back alone, and not all of its layers do"
    return varlen.lacking(model)
