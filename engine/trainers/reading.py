"""Where a trainer's batches come from: the loader of its rows or a stream, made here or by other processes.

What is read is timed, and the place in a stream goes into each checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard

from engine.trainers.saving import SavesCheckpoints
from engine.trainers.stream_loader import Dealt, StreamLoader
from engine.trainers.token_counts import ROWS, Origin, WithRows
from engine.trainers.uneven import WHOLE, Part, Uncounted, UnevenShare, left_uneven


class ReadsRows(SavesCheckpoints):
    """A trainer that reads its data set, or the stream that `read_from` gives it."""

    stream_loader: StreamLoader | None = None
    samples_answers = False
    """Whether a step begins with answers of the model: rows are then dealt out in groups, and those that make no batch left out."""
    _share: UnevenShare | None = None
    """Which training rows this process reads."""
    _held_out_share: UnevenShare | None = None

    def read_from(self, stream: Any) -> None:
        """Train on the rows of a stream, in the place of those that the trainer was built with; before `restore`."""
        args = self.args
        dealt = self._dealt()
        # Other processes may be a step behind.
        workers, prefetch = args.dataloader_num_workers, args.dataloader_prefetch_factor or 0
        stream.keep = 2 * args.gradient_accumulation_steps + 2 + workers * prefetch
        collate = self.data_collator
        if not workers:
            if isinstance(collate, WithRows):
                collate.collate = self.clock.reads(collate._collate)
            stream.next_row = self.clock.reads(stream.next_row)
        self.stream_loader = StreamLoader(stream, dealt, collate, args.device, workers, prefetch)
        if workers:
            self.stream_loader.take = self.clock.reads(next)
        self._dealt_out = 0
        self.register_state("stream", self.stream_loader)

    def _dealt(self) -> Dealt:
        args = self.args
        return Dealt(args.per_device_train_batch_size, args.world_size, args.process_index)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of a step. transformers takes a step once so many batches are made as the arguments say, and the rows
        of a stream may be over before: its last step is made of those that are left."""
        if self.args.dataloader_num_workers and self.stream_loader is None:
            epoch_iterator = self._awaited(epoch_iterator)
        with Uncounted() as fillings:
            if self.args.world_size > 1:
                epoch_iterator = self._weighed(epoch_iterator, fillings)
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.stream_loader is not None:
            if 0 < len(batches) < num_batches:
                self.args.gradient_accumulation_steps = self._dealt_out + len(batches)
            self._dealt_out += len(batches)
        return batches, items

    def _weighed(self, batches: Iterator[Any], fillings: Uncounted) -> Iterator[Any]:
        """Batches that know what part they are; those that only fill in are counted nowhere."""
        for batch in batches:
            if isinstance(batch, dict) and isinstance(origin := batch.get(ROWS), Origin):
                stream = self.stream_loader
                origin.part = self._part_of_last(self._share) if stream is None else stream.part
                if origin.part.fills_in:
                    origin.count_nothing()
                    fillings.hide(batch)
            yield batch

    def _part_of_last(self, share: UnevenShare | None) -> Part:
        """This process's part of the batch that was read last."""
        return share.last if share is not None and self.accelerator.gradient_state.end_of_dataloader else WHOLE

    def _awaited(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches of loader processes, the wait for them counted. accelerate also sends one to the device there, which waits for
        the steps before: that is waited for first, and is no waiting for data."""
        take = self.clock.reads(next)
        while True:
            wait_for_steps(self.args.device)
            if (batch := take(batches, None)) is None:
                return
            yield batch

    def get_train_dataloader(self) -> Any:
        """The loader, whose order follows the epoch on several ranks too: a resume in the middle of one puts a wrapper around
        each rank's share, and accelerate looks for the sampler one level below it."""
        if self.stream_loader is not None:
            return self.stream_loader
        loader = super().get_train_dataloader()
        if not self.samples_answers:
            self._share = left_uneven(loader)
        if isinstance(share := loader.batch_sampler, BatchSamplerShard):
            for name in ("sampler", "set_epoch"):
                if (found := getattr(share.batch_sampler, name, None)) is not None:
                    setattr(share, name, found)
        self._time_reading(loader)
        return loader

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super().get_eval_dataloader(*args, **kwargs)
        if not self.samples_answers:
            self._held_out_share = left_uneven(loader)
        return loader

    def _time_reading(self, loader: Any) -> None:
        """Has the clock count the reading of rows from the data set, and their collating where the collator is ours; not in
        processes of the loader, whose batches are waited for in `_awaited`."""
        if loader.num_workers:
            return
        rows = loader.dataset
        if getattr(rows, "__getitems__", None) is not None:
            rows.__getitems__ = self.clock.reads(type(rows).__getitems__.__get__(rows))
        if isinstance(collator := loader.collate_fn, WithRows):
            collator.collate = self.clock.reads(collator._collate)


def wait_for_steps(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
