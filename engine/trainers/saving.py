"""The one mixin: what every trainer of ours does around a step and at a save.

A save writes into `checkpoint-N.tmp` and is committed by `engine.run.checkpoint`, so a checkpoint is whole or absent;
transformers' own rotation and its search for the last checkpoint are never used. Token counts are state: they are saved
and come back with the checkpoint, as does every part that a trainer registers (`engine.trainers.parts`). Row ids leave
the batch before the model sees it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from safetensors import SafetensorError

from engine.models.taken_up import take_up
from engine.run import checkpoint
from engine.run.store import RunFolder
from engine.trainers.optimizers.building import optimizer_for
from engine.trainers.optimizers.kept import keep_formats
from engine.trainers.parts import Parts, Stateful

TOKENS_STATE = "tokens_state.json"
ROWS = "rows"


class Origin:
    """Which rows made a batch, and how many of its tokens there are and are trained: counted on the host, where a batch is
    made, since each count on a card is a kernel more a step. No list, since accelerate and transformers walk each number
    of one on its way to the device: a thousand calls a step for a batch of 64."""

    __slots__ = ("rows", "tokens", "trained")

    def __init__(self, rows: list[int], tokens: int, trained: int) -> None:
        self.rows, self.tokens, self.trained = rows, tokens, trained


class WithRows:
    """A collator that also hands on where the batch comes from; `collator` is the preview's own object."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(rows)
        packed = bool(rows) and "rows" in rows[0]
        ids = [each for row in rows for each in row["rows"]] if packed else [row.get("row", -1) for row in rows]
        batch[ROWS] = Origin(ids, *(int(count) for count in counted(batch)))
        return batch


def counted(batch: dict[str, Any]) -> tuple[Any, Any]:
    """How many tokens a batch has and how many of them are trained: tensors of one number on the batch's own device."""
    mask = batch.get("attention_mask")
    total = mask.sum() if mask is not None else torch.tensor(batch["input_ids"].numel())
    return total, batch["labels"].ne(-100).sum() if "labels" in batch else batch["completion_mask"].sum()


class RunTrainer:
    """Mixed in before a transformers trainer. `attach` gives it its run before `train`."""

    run: RunFolder
    writer: Any
    keep: int
    commit_info: dict[str, Any]

    def __init__(self, *args: Any, optim: Any = None, **kwargs: Any) -> None:
        """`optim` is the section of that name; without it the optimizer is the one of the arguments.

        What is trained keeps its format: beside quantized weights TRL turns all of it into bfloat16.
        """
        self._optim = optim
        model = kwargs.get("model")
        trained = [(each, each.data) for each in model.parameters() if each.requires_grad] if model is not None else []
        super().__init__(*args, **kwargs)
        for weight, data in trained:
            if weight.dtype != data.dtype:
                weight.data = data.to(weight.device)

    def attach(self, run: RunFolder, writer: Any, keep: int, commit_info: dict[str, Any]) -> None:
        """`writer` is the run's EventWriter on rank 0 and None elsewhere; `commit_info` goes into COMMIT.json."""
        self.run, self.writer, self.keep, self.commit_info = run, writer, keep, commit_info
        self.tokens, self.trained_tokens = 0, 0
        self.batch_rows: list[int] = []
        self._uncounted: list[tuple[Any, Any]] = []
        # Asked once: accelerate looks its state up anew each time.
        self._ranks: int = self.accelerator.num_processes  # type: ignore[attr-defined]

    def register_state(self, name: str, part: Stateful) -> None:
        """From now on the state of `part` goes into each checkpoint and comes back on resume; call it in `build`."""
        self._registered().add(name, part)

    def _registered(self) -> Parts:
        return self.__dict__.setdefault("_parts", Parts())

    # -- the optimizer -------------------------------------------------------------------------------------------------
    def create_optimizer(self, model: Any = None) -> Any:
        """transformers' own, or one that `engine.trainers.optimizers` builds."""
        if self.optimizer is None and self._optim is not None:  # type: ignore[has-type]
            taken = self.model if model is None else model  # type: ignore[attr-defined]
            decayed = self.get_decay_parameter_names(taken)  # type: ignore[attr-defined]
            self.optimizer = optimizer_for(self._optim, taken, decayed)
        optimizer = super().create_optimizer(model)  # type: ignore[misc]
        keep_formats(optimizer)
        return optimizer

    def average_weights(self) -> None:
        """Gives the model the weights that are meant for use, where the optimizer keeps others for training
        (schedule-free): before held-out rows, samples and checkpoints. The next step takes its own back. On all ranks."""
        if callable(average := getattr(self.optimizer, "eval", None)):
            average()

    def get_train_dataloader(self) -> Any:
        """The loader, whose order follows the epoch on several ranks too: a resume in the middle of one puts a wrapper around
        each rank's share, and accelerate looks for the sampler one level below it."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        if isinstance(share := loader.batch_sampler, BatchSamplerShard):
            for name in ("sampler", "set_epoch"):
                if (found := getattr(share.batch_sampler, name, None)) is not None:
                    setattr(share, name, found)
        return loader

    # -- steps ---------------------------------------------------------------------------------------------------------
    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        origin = inputs.pop(ROWS)
        self.batch_rows.extend(origin.rows)
        self._count(origin.tokens, origin.trained)
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs.pop(ROWS, None)
        return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _count(self, total: Any, trained: Any) -> None:
        """Notes a batch's tokens; those counted on a device are read when they are logged, so nothing waits for them."""
        self._uncounted.append((total, trained))

    def token_counts(self) -> tuple[int, int]:
        """Tokens seen and tokens trained so far, on all ranks together."""
        if self._uncounted:
            total, trained = self._read_counts()
            self.tokens += total
            self.trained_tokens += trained
            self._uncounted.clear()
        return self.tokens, self.trained_tokens

    def _read_counts(self) -> tuple[int, int]:
        """The sums of what is not counted yet; from a device in one copy, on the host without a kernel."""
        on_host = isinstance(self._uncounted[0][0], int) or self._uncounted[0][1].device.type == "cpu"
        if self._ranks == 1 and on_host:
            return sum(int(total) for total, _ in self._uncounted), sum(int(trained) for _, trained in self._uncounted)
        device = self.accelerator.device  # type: ignore[attr-defined]
        each = [torch.as_tensor(count, device=device) for pair in self._uncounted for count in pair]
        fresh = torch.stack(each).view(-1, 2).sum(0)
        if self._ranks > 1:
            fresh = self.accelerator.reduce(fresh)  # type: ignore[attr-defined]
        total, trained = fresh.tolist()
        return int(total), int(trained)

    # -- saving and resuming -------------------------------------------------------------------------------------------
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        begun = time.monotonic()
        step = self.state.global_step  # type: ignore[attr-defined]
        if (self.run.checkpoints / f"checkpoint-{step}").is_dir() and checkpoint.is_valid(
            self.run.checkpoints / f"checkpoint-{step}"
        ):
            return
        first = self.args.should_save  # type: ignore[attr-defined]
        self.average_weights()
        self._say_checkpoint(step, "saving")
        tmp = self.run.checkpoints / f"checkpoint-{step}.tmp"
        if first:
            checkpoint.begin(self.run, step)
        self.accelerator.wait_for_everyone()  # type: ignore[attr-defined]
        try:
            self._write_parts(tmp)
        except (OSError, RuntimeError, SafetensorError) as problem:
            if first and (told := checkpoint.without_room(tmp, problem)) is not None:
                raise told from problem
            raise
        self.accelerator.wait_for_everyone()  # type: ignore[attr-defined]
        if not first:
            return
        for unwanted in checkpoint.UNWANTED:
            (tmp / unwanted).unlink(missing_ok=True)
        final = checkpoint.commit(tmp, {**self.commit_info, "rng": _rng_kinds()})
        self._say_checkpoint(step, "committed", bytes=checkpoint.size_of(final), seconds=time.monotonic() - begun)
        for gone in checkpoint.prune(self.run, self.keep):
            self._say_checkpoint(checkpoint.step_of(gone) or 0, "deleted")

    def _write_parts(self, tmp: Path) -> None:
        self.store_flos()  # type: ignore[attr-defined]
        self.save_model(str(tmp), _internal_call=True)  # type: ignore[attr-defined]
        self._save_optimizer_and_scheduler(str(tmp))  # type: ignore[attr-defined]
        self._save_scaler(str(tmp))  # type: ignore[attr-defined]
        self._save_rng_state(str(tmp))  # type: ignore[attr-defined]
        self._registered().save(tmp, self.args.process_index)  # type: ignore[attr-defined]
        total, trained = self.token_counts()
        if self.args.should_save:  # type: ignore[attr-defined]
            self.state.save_to_json(str(tmp / "trainer_state.json"))  # type: ignore[attr-defined]
            counted = {"total": total, "trainable": trained, "trl_num_tokens": getattr(self, "_total_train_tokens", 0)}
            (tmp / TOKENS_STATE).write_text(json.dumps(counted), "utf-8")

    def restore(self, path: Path) -> None:
        """Takes up what transformers does not: token counts and registered parts of this rank. Before `train`."""
        self._registered().load(path, self.args.process_index)  # type: ignore[attr-defined]
        found = path / TOKENS_STATE
        if found.is_file():
            counted = json.loads(found.read_text("utf-8"))
            self.tokens, self.trained_tokens = counted["total"], counted["trainable"]
            self._total_train_tokens = counted["trl_num_tokens"]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Full weights by `engine.models.taken_up`. Two things that loading an adapter loses: transformers 5.17 leaves one
        that was saved beside another (TRL's `ref`) at its start, and PEFT raises weights of bfloat16 to float32."""
        model = self.model if model is None else model  # type: ignore[attr-defined]
        if not hasattr(model, "peft_config"):
            take_up(model, Path(resume_from_checkpoint), self._registered().weights())
            return
        dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        if len(getattr(model, "peft_config", ())) > 1:
            trained = model.active_adapters[0]
            model.load_adapter(resume_from_checkpoint, trained, is_trainable=True)
            model.set_adapter(trained)
        for name, weight in model.named_parameters():
            weight.data = weight.data.to(dtypes.get(name, weight.dtype))

    def _say_checkpoint(self, step: int, state: str, **more: Any) -> None:
        if self.writer is not None:
            self.writer.write("checkpoint", step=step, path=f"checkpoint-{step}", state=state, **more)


def _rng_kinds() -> list[str]:
    return ["python", "numpy", "cpu", *(["cuda"] if torch.cuda.is_available() else [])]
