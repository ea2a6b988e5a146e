"""The one mixin: what every trainer of ours does around a step.

How it saves and comes back stands in `engine.trainers.saving`, where its batches come from in `engine.trainers.reading`. Row
ids leave the batch before the model sees it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from transformers import PreTrainedModel

from engine.compat import fsdp2
from engine.compat.trl_head import set_label_count
from engine.config.adapter import Adapter, Lora
from engine.config.optim import Optim
from engine.features.attention_backend.positions import attach_positions
from engine.features.built import Built, Notes, ReferenceBy, base_model
from engine.models.vision_parts import frozen_paths
from engine.run.async_writer import AsyncWriter
from engine.run.store import RunFolder
from engine.trainers import sharded
from engine.trainers.clock import StepClock
from engine.trainers.finite import FiniteSteps
from engine.trainers.optimizers.building import keep_state_formats, optimizer_for
from engine.trainers.optimizers.loraplus import divide_groups
from engine.trainers.ranks import Ranks
from engine.trainers.reading import ReadsRows
from engine.trainers.saving import CheckpointWriter
from engine.trainers.token_counts import TokenCounts, take_origin
from engine.trainers.uneven import WHOLE, Part, gathering, mean_of_all, trained_tokens


class RunTrainer(ReadsRows):
    """Mixed in before a transformers trainer. `attach` gives it its run before `train`."""

    loss_by: str | None = None
    """Whose loss it is, for the receipt; None for that of the library's trainer."""
    ref_model: PreTrainedModel | None = None
    """A copy of the model that the policy is held to; None where there is none, or it is the policy without its adapter."""
    sums_tokens = False
    """Whether the loss is a mean over all tokens that are trained in a step, and not over rows."""
    gathers_means = 0
    """How many of the single numbers that the library's trainer asks of all processes, those of a batch that it asks first, are
    means over the rows of each, and not sums."""
    _metrics: dict[str, Any]
    means_of_rows: tuple[str, ...] = ()
    """Of the library's curves, those that are a mean over the rows of each batch of held-out rows."""
    batch_part = WHOLE
    """What this process has of the batch that is learned from, or measured, at the moment."""

    def __init__(self, *args: Any, optim: Optim | None = None, adapter: Adapter | None = None, **kwargs: Any) -> None:
        """`optim` and `adapter` are the sections of that name; without them the optimizer is the one of the arguments.

        What is trained keeps its format: beside quantized weights TRL turns all of it into bfloat16.
        """
        self._optim, self._adapter = optim, adapter
        self._held_out_rows: list[int] = []
        """Of each batch of held-out rows that was measured since the last line, on all processes."""
        self.clock, self.finite = StepClock(), FiniteSteps()
        self.checkpoints = CheckpointWriter(self)
        self._given = model = kwargs.get("model")
        trained = [(each, each.data) for each in model.parameters() if each.requires_grad] if model is not None else []
        super().__init__(*args, **kwargs)
        if self.args.device.type == "cuda":
            self.clock.settle = functools.partial(torch.cuda.synchronize, self.args.device)
        for weight, data in trained:
            if weight.dtype != data.dtype:
                weight.data = data.to(weight.device)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        asked, sizes = self.args.fsdp_plugin_args, self.args.parallelism_config
        if asked is not None and fsdp2.take_on_cpu(self.accelerator, asked, sizes):
            self.is_fsdp_enabled = True
        if self.is_fsdp_enabled:
            fsdp2.shard_heads_with_norms(self.accelerator)
        if self._given is not None and self.is_fsdp_enabled:
            fsdp2.wrap_what_is_there(self.accelerator, self._given, frozen_paths(base_model(self._given)))

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments = fsdp2.without_mesh_on_cpu(super()._build_accelerator_args(**kwargs))
        for handler in arguments.get("kwargs_handlers") or ():
            if isinstance(handler, DistributedDataParallelKwargs):
                # Sums come to lie where gradients are read: one copy of each less.
                handler.gradient_as_bucket_view = True
                # Buffers that no checkpoint holds follow from the config and the inputs: they are not sent with each pass.
                if handler.broadcast_buffers and not _kept_buffers(self.model):
                    handler.broadcast_buffers = False
        return arguments

    def attach(
        self,
        run: RunFolder,
        writer: AsyncWriter | None,
        keep: int,
        commit_info: dict[str, Any],
        finite: FiniteSteps | None = None,
    ) -> None:
        """`writer` is the run's on rank 0 and None elsewhere; `commit_info` goes into COMMIT.json; `finite`
        follows `run.on_nan`."""
        self.run, self.writer, self.keep, self.commit_info = run, writer, keep, commit_info
        self.batch_rows: list[int] = []
        self.on_progress: Callable[[], None] = lambda: None
        """Hears that this rank begins a batch, of training or of held-out rows."""
        self.note_rows: Callable[[int, list[int]], None] = lambda step, rows: None
        """Hears the step that is being made and its rows so far, before they are trained on."""
        self.finite = finite or self.finite
        self.finite.accelerator = self.accelerator
        self.add_callback(self.finite)
        self.ranks = Ranks(self.clock)
        self.counts = TokenCounts(self.accelerator, self.ranks)
        if self.accelerator.num_processes > 1:
            timed = self.ranks.waits.forward(self.compute_loss)
            self.compute_loss = self._of_its_rows(timed)  # type: ignore[method-assign]  # around all of them
            self._time_waits()

    def _time_waits(self) -> None:
        """Has the time taken that this process waits for others; that of shares once there are any (`on_train_begin`)."""
        waits, accelerator = self.ranks.waits, self.accelerator
        accelerator.gather, accelerator.reduce = waits.around(accelerator.gather), waits.around(accelerator.reduce)
        if not self.is_fsdp_enabled:
            accelerator.backward = waits.after_gradients(accelerator.backward)

    def _of_its_rows(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """The same loss, weighed so that its mean over processes is the one over rows where those have not as many each."""

        @functools.wraps(compute)
        def weighed(*args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
            loss = compute(*args, num_items_in_batch=num_items_in_batch, **kwargs)
            part = self.batch_part
            if not part.uneven or not self.model.training:
                return loss
            # What is divided by the tokens of all is a sum: it is left out or not.
            return loss * (part.weight if num_items_in_batch is None else float(not part.fills_in))

        return weighed

    def built(self, notes: Notes) -> Built:
        """The trainer and its models, for the features."""
        return Built(
            policy=self.model,
            trainer=self,
            reference=self.ref_model,
            reference_by=self.reference_by(),
            events=self.writer,
            notes=notes,
        )

    def reference_by(self) -> ReferenceBy:
        """Where the log-probabilities of a reference come from."""
        return "none"

    def receipt_note(self) -> str:
        """What the receipt adds about the loss."""
        return ""

    # -- the optimizer -------------------------------------------------------------------------------------------------
    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """transformers' own, or one that `engine.trainers.optimizers` builds."""
        if self.optimizer is None and self._optim is not None:
            taken = self.model if model is None else model
            decayed = self.get_decay_parameter_names(taken)
            self.optimizer = optimizer_for(self._optim, taken, decayed)
        optimizer = super().create_optimizer(model)
        if isinstance(self._adapter, Lora) and self._adapter.loraplus_lr_ratio is not None:
            divide_groups(optimizer, self.model if model is None else model, self._adapter)
        keep_state_formats(optimizer)
        return optimizer

    def draw_by_itself(self) -> None:
        """Has dropout and noise of this process draw other numbers than those of the first: until here all have drawn the same, so
        that they built the same model. TRL seeds each process itself where answers are sampled."""
        if self.args.process_index and not self.samples_answers:
            set_seed(self.args.seed, device_specific=True)

    # -- steps ---------------------------------------------------------------------------------------------------------
    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        origin = take_origin(inputs)
        assert origin is not None
        self.on_progress()
        self.checkpoints.before_step()
        self._trains_on(origin.rows)
        if origin.labelled is not None and "labels" in inputs:
            set_label_count(inputs["labels"], origin.labelled)
        if origin.positions is not None and "position_ids" in inputs:
            attach_positions(inputs["position_ids"], origin.positions)
        with self._with_part(origin.part):
            loss = self.finite.loss(super().training_step(model, inputs, *args, **kwargs))
        # Behind the batch: the step before it may be logged within it.
        self.counts.add(origin.tokens, origin.trained)
        return loss

    def logs_late(self) -> bool:
        """Whether the step that ends now is logged within the next one, so that nothing waits for the device."""
        return False

    @contextlib.contextmanager
    def _with_part(self, part: Part) -> Iterator[None]:
        """Within it the batch is this part of one."""
        self.batch_part = part
        try:
            together = gathering(self.accelerator, part, means=self.gathers_means)
            with together if self.args.world_size > 1 else contextlib.nullcontext():
                yield
        finally:
            self.batch_part = WHOLE

    def _trains_on(self, rows: list[int]) -> None:
        self.batch_rows.extend(rows)
        self.note_rows(self.state.global_step + 1, self.batch_rows)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """transformers asks for the norm once a step, whether it clips or not."""
        norm = super()._get_grad_norm(*args, **kwargs)
        norm = sharded.full_tensor(norm) if isinstance(norm, torch.Tensor) else norm
        self.finite.norm(self.state.global_step + 1, norm)
        return norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Numbers go to the events. transformers also keeps all of them, in memory and in each checkpoint: a run of many
        steps would grow by both."""
        if "loss" in logs and self.finite.lost_a_loss():
            logs["loss"] = math.nan
        if "learning_rate" in logs and isinstance(self._adapter, Lora) and self._adapter.loraplus_lr_ratio is not None:
            logs["learning_rate_lora_B"] = logs["learning_rate"] * self._adapter.loraplus_lr_ratio
        if self.means_of_rows and not self.model.training:
            self._count_rows_alike()
        super().log(logs, *args, **kwargs)
        self.state.log_history.clear()

    def _count_rows_alike(self) -> None:
        """TRL takes the mean of its batches, in which a row of a smaller last one would count for more."""
        curves, rows = self._metrics["eval"], self._held_out_rows
        for name in self.means_of_rows:
            values: list[float] = curves.get(name, [])
            if any(rows) and len(values) == len(rows):
                curves[name] = [sum(map(operator.mul, values, rows)) / sum(rows)]
        rows.clear()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.pause():
            return super().evaluate(*args, **kwargs)

    def prediction_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        take_origin(inputs)
        self.on_progress()
        with self._with_part(self._part_of_last(self._held_out_share)):
            if self.means_of_rows:
                rows = len(inputs["input_ids"]) * (not self.batch_part.fills_in)
                self._held_out_rows.append(int(self.accelerator.reduce(torch.tensor(rows, device=self.args.device))))
            if not self.sums_tokens or self.args.world_size == 1:
                return super().prediction_step(model, inputs, *args, **kwargs)
            tokens = trained_tokens(inputs) * (not self.batch_part.fills_in)
            found: tuple[Any, ...] = super().prediction_step(model, inputs, *args, **kwargs)
        return mean_of_all(found[0], tokens), *found[1:]


def _kept_buffers(model: torch.nn.Module) -> bool:
    """Whether a model has buffers that are saved with it."""
    return any(
        buffers.keys() - module._non_persistent_buffers_set
        for module in model.modules()
        if (buffers := module._buffers)
    )
