"""What a checkpoint's files hold and how they come back; `CheckpointWriter` makes checkpoints on all ranks.

A save writes into `checkpoint-N.tmp` and is committed by `engine.run.checkpoint`, so a checkpoint is whole or absent;
transformers' own rotation and its search for the last checkpoint are never used. Token counts are state: they are saved
and come back with the checkpoint, as does every part that a trainer registers (`engine.trainers.stateful`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedModel, Trainer

from engine import model_files
from engine.compat.instances import put
from engine.errors import Diverged, WorkbenchError, visible
from engine.features.built import base_model
from engine.model_files import ADAPTER_WEIGHTS, WEIGHTS
from engine.models.expert_shards import is_divided
from engine.models.restore_weights import take_up
from engine.run import checkpoint
from engine.run.async_writer import AsyncWriter
from engine.run.inside import UnsafeRunFile
from engine.run.store import RunFolder
from engine.trainers import sharded
from engine.trainers.async_save import AsyncSave
from engine.trainers.clock import StepClock
from engine.trainers.finite import FiniteSteps, non_finite_weights, refuse_non_finite_checkpoint
from engine.trainers.optimizers.configured import as_configured
from engine.trainers.ranks import Ranks
from engine.trainers.sharded import OPTIMIZER
from engine.trainers.stateful import Parts, Stateful, refusing_pickles
from engine.trainers.token_counts import TokenCounts

TOKENS_STATE = "tokens_state.json"
SCHEDULER = "scheduler.pt"
"""transformers' name of the file."""


class SavesCheckpoints(Trainer):
    """A trainer that saves into its run and comes back: weights whole or in shares, whichever the run has, and the states of
    registered parts. They come back into either; nothing is unpickled."""

    model: PreTrainedModel | PeftModel
    run: RunFolder
    writer: AsyncWriter | None
    keep: int
    commit_info: dict[str, Any]
    finite: FiniteSteps
    counts: TokenCounts
    clock: StepClock
    ranks: Ranks
    checkpoints: CheckpointWriter

    def register_state(self, name: str, part: Stateful) -> None:
        """From now on the state of `part` goes into each checkpoint and comes back on resume; call it in `build`."""
        self._registered().add(name, part)

    def _registered(self) -> Parts:
        return self.__dict__.setdefault("_parts", Parts())

    def average_weights(self) -> None:
        """Gives the model the weights that are meant for use, where the optimizer keeps others for training
        (schedule-free): before held-out rows, samples and checkpoints. The next step takes its own back. On all ranks."""
        if callable(average := getattr(self.optimizer, "eval", None)):
            average()

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        with self.clock.pause():
            self.checkpoints.wait()
            self.checkpoints.save()

    def restore(self, path: Path) -> None:
        """Takes up what transformers does not: token counts and registered parts of this rank. Before `train`."""
        with refusing_pickles(path):
            self._registered().load(path, self.args.process_index, self.args.world_size)
        found = path / TOKENS_STATE
        if found.is_file():
            counted = json.loads(found.read_text("utf-8"))
            self.counts.total, self.counts.trained = counted["total"], counted["trainable"]
            self._total_train_tokens = counted["trl_num_tokens"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Shares of full weights are written by who holds them; an adapter is one plain folder, however it was held."""
        if not (is_divided(self.model) or sharded.is_sharded(self.model)):
            super().save_model(output_dir, _internal_call=_internal_call)
            return
        into = Path(output_dir or str(self.args.output_dir))
        if isinstance(self.model, PeftModel):
            weights = sharded.adapter_weights(self.model)
            if self.args.should_save:  # older transformers leave that to who calls
                self._save(str(into), state_dict=weights)
            return
        sharded.save_weights(self.model, into)
        self._save_beside_shares(into)

    def _save_beside_shares(self, into: Path) -> None:
        """What describes full weights that are in shares."""
        if self.args.should_save:
            sharded.save_settings(self.model, into)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(into)

    def _save_optimizer_and_scheduler(self, output_dir: str, *, late: bool = False) -> None:
        first, into = self.args.should_save, Path(output_dir)
        if is_divided(self.model) and isinstance(self.model, PeftModel):
            states = sharded.full_optim_states(_inner(self.optimizer))
            if first:
                torch.save(states, into / OPTIMIZER)
        elif not (is_divided(self.model) or sharded.is_sharded(self.model)):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        elif not late:
            sharded.save_optimizer(_inner(self.optimizer), self.model, into, first=first)
        elif first:
            sharded.save_groups(_inner(self.optimizer), into)
        if first and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), into / SCHEDULER)

    def take_weights(self, path: Path) -> None:
        """Takes up the weights of a checkpoint, those of registered parts too, and nothing else of its training."""
        self._load_from_checkpoint(str(path))
        with refusing_pickles(path):
            self._registered().load_weights(path, self.args.process_index)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """States come back into shares or whole, whichever this run has and the checkpoint holds."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        with refusing_pickles(folder), as_configured(_inner(self.optimizer), self.lr_scheduler):
            shares = sharded.holds_shards(folder)
            divided = is_divided(self.model)
            plain = not (shares or divided or sharded.is_sharded(self.model))
            # Of several processes on a CPU transformers before 5.18 asks torch for "cpu:0", where it restores nothing.
            if plain and (self.args.world_size == 1 or self.args.device.type != "cpu"):
                super()._load_optimizer_and_scheduler(checkpoint)
                return
            if plain or (divided and not shares):
                saved = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
                sharded.take_states(self.optimizer, saved)
            else:
                take = sharded.load_optimizer if shares else sharded.take_optimizer
                take(_inner(self.optimizer), self.model, folder)
            if self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))

    def _load_scaler(self, checkpoint: str | None) -> None:
        with refusing_pickles(Path(checkpoint or ".")):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with refusing_pickles(Path(checkpoint or ".")):
            super()._load_rng_state(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Full weights by `engine.models.restore_weights`. Two things that loading an adapter loses: transformers 5.17 leaves one
        that was saved beside another (TRL's `ref`) at its start, and PEFT raises weights of 16 bits to float32 unless it is told
        not to: 0.21.2 by other parameters in their place, and gradients of those that are known would never be clipped. One that this
        run has not (it is held to another reference now) stays in its file, since TRL would be held to it."""
        model = self.model if model is None else model
        folder = Path(resume_from_checkpoint)
        if sharded.is_sharded(model) or is_divided(model) or (folder / model_files.SHARES).is_dir():
            sharded.restore_weights(model, folder)
            refuse_non_finite_checkpoint(model, folder)
            return
        if not isinstance(model, PeftModel):
            take_up(base_model(model), folder, self._registered().weights())
            refuse_non_finite_checkpoint(model, folder)
            return
        model_files.refuse_what_it_names(folder)
        model_files.refuse_pickled_adapter(folder)
        load = functools.partial(model.load_adapter, autocast_adapter_dtype=False)

        def load_own(place: str, name: str, **settings: Any) -> Any:
            return load(place, name, **settings) if name in model.peft_config else None

        undo = put(model, "load_adapter", load_own)
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if len(model.peft_config) > 1:
                trained = model.active_adapters[0]
                model.load_adapter(resume_from_checkpoint, trained, is_trainable=True)
                model.set_adapter(trained)
        finally:
            undo()
        refuse_non_finite_checkpoint(model, folder)


class CheckpointWriter:
    """Writes the checkpoints of a trainer on all its ranks: shares of full weights beside the training, all else before it
    goes on."""

    def __init__(self, trainer: SavesCheckpoints) -> None:
        self._trainer = trainer
        self._async_save: AsyncSave | None = None
        self._room_asked = False
        self.on_commit: Callable[[int], None] = lambda step: None
        """On the first rank, told of each checkpoint that is whole; waited for, so it must not wait itself."""
        self.took: dict[str, float] = {}
        """Seconds of each part of what the last checkpoint kept the training waiting for; the benchmarks read it."""

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.took[name] = self.took.get(name, 0.0) + time.monotonic() - begun

    def save(self) -> None:
        """Commits a checkpoint of this step. Raises Diverged where the weights are not finite, under `go_on` only says that
        none is made: what is kept stays."""
        trainer = self._trainer
        begun = time.monotonic()
        step = trainer.state.global_step
        if self._has_checkpoint(step):
            return
        first = trainer.args.should_save
        self.took = {}
        with self._part("weights looked at"):
            trainer.average_weights()
            weight = self._non_finite_weight()
        if weight is not None:
            self._refuse_to_save(step, weight)
            return
        self._report(step, "saving")
        tmp = trainer.run.checkpoints / f"checkpoint-{step}.tmp"
        if first:
            checkpoint.begin(trainer.run, step)
        with self._part("ranks meet"):
            trainer.accelerator.wait_for_everyone()
        with checkpoint.abandoned_on_error(tmp) if first else contextlib.nullcontext():
            if (copies := self._copied()) is None:
                self._write_parts(tmp)
                trainer.accelerator.wait_for_everyone()
                if first:
                    self._commit(tmp, begun, trainer.state.best_global_step)
                return
            with self._part("other files"):
                self._write_parts(tmp, late=True)
            with self._part("ranks meet"):
                trainer.accelerator.wait_for_everyone()
        assert self._async_save is not None
        waited, best = time.monotonic() - begun, trainer.state.best_global_step
        with self._part("thread begun"):
            self._async_save.begin(lambda group: self._write_async(tmp, copies, group, begun, waited, best))

    def _has_checkpoint(self, step: int) -> bool:
        """Whether this step has its checkpoint already, as the first rank sees it: another may ask before that has given it its
        name, or look into a shared folder that tells late, and would wait for a save that no other takes part in."""
        trainer = self._trainer
        first = trainer.args.should_save
        made = first and checkpoint.is_valid(trainer.run.checkpoints / f"checkpoint-{step}")
        return bool(trainer.ranks.agreed(int(made))) if trainer.args.world_size > 1 else made

    def wait(self) -> None:
        """Waits for a checkpoint that is written beside the training, and raises what went wrong with it."""
        if self._async_save is not None:
            self._async_save.settle()

    def finish(self) -> None:
        """Waits for such a checkpoint where the training has failed: what was whole before it did is kept. What goes wrong
        with it is not what the run ends by."""
        with contextlib.suppress(Exception):
            self.wait()

    def raise_failed(self) -> None:
        """Raises what went wrong with a checkpoint that is written beside the training. On the first rank alone, which says how
        the run ended: one that left before it would be taken for the cause."""
        if self._async_save is not None and self._async_save.failed and self._trainer.args.should_save:
            self._async_save.settle()

    def before_step(self) -> None:
        """On all ranks, as each micro-batch begins: raises what failed, and has room made for the copies of the next checkpoint
        once the optimizer has states to copy."""
        self.raise_failed()
        if not self._room_asked and _inner(self._trainer.optimizer).state:
            self._room_asked = True
            if (states := self._shares_with_room()) is not None and self._async_save is not None:
                self._async_save.make_room(states)

    def _shares_with_room(self) -> dict[str, torch.Tensor] | None:
        """What this rank holds of full weights and optimizer, where they are shares and the machine has room for copies."""
        trainer = self._trainer
        if isinstance(trainer.model, PeftModel):
            return None
        if not (is_divided(trainer.model) or sharded.is_sharded(trainer.model)):
            return None
        self._async_save = self._async_save or AsyncSave(trainer.args.ddp_timeout)
        states = sharded.states(trainer.model, _inner(trainer.optimizer))
        return states if self._async_save.has_room(states, trainer.accelerator.device) else None

    def _copied(self) -> dict[str, torch.Tensor] | None:
        """Copies of these shares, where there is room."""
        with self._part("shares listed"):
            states = self._shares_with_room()
        if states is None or self._async_save is None:
            return None
        with self._part("main memory awaited"):
            self._async_save.await_room(states)
        with self._part("copied"):
            return self._async_save.copy(states)

    def _write_async(
        self, tmp: Path, copies: dict[str, Any], group: Any, begun: float, waited: float, best: int | None
    ) -> None:
        """On a thread beside the training: this rank's shares, and the checkpoint's name once all ranks have written."""
        first = self._trainer.args.should_save
        try:
            with checkpoint.abandoned_on_error(tmp) if first else contextlib.nullcontext():
                try:
                    sharded.save_states(copies, tmp, group)
                except (OSError, RuntimeError, SafetensorError) as problem:
                    if first and (told := checkpoint.without_room(tmp, problem, WEIGHTS)) is not None:
                        raise _of_its_rank(told, problem) from problem
                    raise
                if first:
                    self._commit(tmp, begun, best, waited=waited)
        except BaseException:
            # Lets ranks pass that have written their part: they go on until the first one ends the run. That another is
            # gone by now tells less than this.
            with contextlib.suppress(RuntimeError):
                torch.distributed.barrier(group)
            raise
        # Where nothing failed, who waits for this knows that the checkpoint has its name, on every rank.
        torch.distributed.barrier(group)

    def _commit(self, tmp: Path, begun: float, best: int | None, **more: float) -> None:
        """Gives a checkpoint that all ranks have written its name, and takes away those that are too many."""
        for unwanted in checkpoint.UNWANTED:
            (tmp / unwanted).unlink(missing_ok=True)
        final = checkpoint.commit(tmp, {**self._trainer.commit_info, "rng": _rng_kinds()})
        seconds, step = time.monotonic() - begun, checkpoint.step_of(final) or 0
        self._report(step, "committed", bytes=checkpoint.size_of(final), seconds=seconds, **more)
        self.on_commit(step)
        self._prune(final, best)

    def _prune(self, final: Path, best: int | None) -> None:
        """Takes away checkpoints that are too many. That one stays which should go ends no run: `final` is whole."""
        before = list(checkpoint.newest_first(self._trainer.run))
        try:
            checkpoint.prune(self._trainer.run, self._trainer.keep, best)
        except (OSError, UnsafeRunFile) as problem:
            reason = visible(
                problem.message if isinstance(problem, UnsafeRunFile) else problem.strerror or str(problem)
            )
            message = f"{final.name} is saved; older checkpoints could not be deleted: {reason}"
            self._warn("run.save_total_limit", "prune", message)
        for path in before:
            if not path.exists():
                self._report(checkpoint.step_of(path) or 0, "deleted")

    def _non_finite_weight(self) -> str | None:
        """The first trained weight that a checkpoint of now would hold and that is not finite; the same on all ranks."""
        trained = [(name, each) for name, each in self._trainer.model.named_parameters() if each.requires_grad]
        return non_finite_weights(
            [*trained, *(("a part of the trainer", each) for each in self._trainer._registered().weights())]
        )

    def _refuse_to_save(self, step: int, weight: str) -> None:
        trainer = self._trainer
        problem = Diverged(step, "the weights")
        if trainer.writer is not None:
            trainer.writer.write("diverged", step=step, what="weights")
        if trainer.finite.on_nan != "go_on" or step >= trainer.state.max_steps:
            raise problem
        message = (
            f"checkpoint-{step} is not saved: the weights are not finite ({visible(weight)}), and no step heals that"
        )
        self._warn("run.on_nan", "diverged", message)

    def _warn(self, path: str, rule: str, message: str) -> None:
        if self._trainer.writer is not None:
            self._trainer.writer.write("finding", path=path, severity="warning", rule=rule, message=message)

    def _write_parts(self, tmp: Path, *, late: bool = False) -> None:
        """Writes each file of a checkpoint; `late`: all but the shares, which follow. Raises WorkbenchError, naming the file,
        where the disk took no more or failed."""
        trainer = self._trainer
        trainer.store_flos()
        adapted = isinstance(trainer.model, PeftModel)
        folder, rank, first = str(tmp), trainer.args.process_index, trainer.args.should_save
        parts: list[tuple[str, Callable[[], Any]]] = [
            (
                ADAPTER_WEIGHTS if adapted else WEIGHTS,
                lambda: trainer._save_beside_shares(tmp) if late else trainer.save_model(folder, _internal_call=True),
            ),
            (OPTIMIZER, lambda: trainer._save_optimizer_and_scheduler(folder, late=late)),
            ("scaler.pt", lambda: trainer._save_scaler(folder)),
            ("rng_state.pth", lambda: trainer._save_rng_state(folder)),
            (f"parts-{rank}.pt", lambda: trainer._registered().save(tmp, rank)),
            ("trainer_state.json", lambda: self._write_state(tmp)),
        ]
        for name, write in parts:
            try:
                write()
            except (OSError, RuntimeError, SafetensorError) as problem:
                # safetensors takes its half file away; an error of a write of our own leaves the file as the newest.
                left = isinstance(problem, OSError) and _holds_something(tmp)
                known = left or ((tmp / name).exists() and not isinstance(problem, SafetensorError))
                if first and (told := checkpoint.without_room(tmp, problem, "" if known else name)) is not None:
                    raise _of_its_rank(told, problem) from problem
                raise

    def _write_state(self, tmp: Path) -> None:
        trainer = self._trainer
        total, trained = trainer.counts.read()
        if trainer.args.should_save:
            trainer.state.save_to_json(str(tmp / "trainer_state.json"))
            counted = {
                "total": total,
                "trainable": trained,
                "trl_num_tokens": getattr(trainer, "_total_train_tokens", 0),
            }
            (tmp / TOKENS_STATE).write_text(json.dumps(counted), "utf-8")

    def _report(self, step: int, state: str, **more: Any) -> None:
        if self._trainer.writer is not None:
            self._trainer.writer.write("checkpoint", step=step, path=f"checkpoint-{step}", state=state, **more)


def _holds_something(folder: Path) -> bool:
    """Whether anything lies in a folder; not in one that another rank, which failed first, has taken away."""
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def _of_its_rank(told: WorkbenchError, problem: Exception) -> WorkbenchError:
    """The sentence with the rank whose disk it was, where shares were written by several."""
    if isinstance(problem, sharded.RankDiskFailure | sharded.RankFailure):
        told.message = f"{sharded.place_of(problem.rank)}: {told.message}"
    return told


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself, without what accelerate puts around it."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _rng_kinds() -> list[str]:
    return ["python", "numpy", "cpu", *(["cuda"] if torch.cuda.is_available() else [])]
