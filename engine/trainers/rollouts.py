"""What GRPO, GDPO and PPO share around TRL's GRPOTrainer: prompts as ids, rewards, groups to look at, exact resume.

TRL samples, scores and splits; hooked in are the rows (tokens already, never rendered again), the rewards (as TRL's own
reward functions), the sampler's order (a function of seed and epoch, so that a resumed run goes on with the same prompts)
and the buffer of sampled answers, which goes into each checkpoint: TRL begins it anew, and a resume in the middle of one
would train on other answers. Refuses nothing itself: the rewards are tried on the first rows before there is a trainer.

Images stay references until a model is asked: TRL would render their prompts again and split their tensors by family, and
its buffer would hold them in each checkpoint. Each pass is given what the collators give for its rows instead.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from accelerate.utils import DistributedType, send_to_device
from peft import PeftModel
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, add_fused_lm_head

from engine.compat.fsdp2 import kept_together
from engine.config.kinds import reference_of
from engine.config.method import learns_from_images
from engine.config.rollouts import Rollouts
from engine.config.tree import RunConfig, method_of
from engine.data.prompts import reward_columns, written
from engine.data.tokens import chat_of
from engine.data.vision import ImageBatch, images_of
from engine.errors import WorkbenchError
from engine.features.built import Built, Notes, base_model
from engine.generate import end_of_turn, stop_ids, without_router_loss
from engine.models.expert_shards import is_divided
from engine.rewards.scoring import Rewards, columns_of
from engine.run.async_writer import AsyncWriter
from engine.run.rollouts import Completion, Group, RolloutFile
from engine.trainers.arguments import shared_arguments
from engine.trainers.job import Job
from engine.trainers.recorded_tokens import refused, sampling_recorded
from engine.trainers.reference import ReferenceTrainer, copy_adapter, frozen_copy
from engine.trainers.replay_buffer import ReplayBuffer
from engine.trainers.reroll import Reroll
from engine.trainers.run_trainer import RunTrainer
from engine.trainers.shared_prompts import (
    answers_per_prompt,
    can_share,
    is_worth_a_pass,
    read_answers,
    sampling_once,
    side_by_side,
)
from engine.trainers.stream_loader import Dealt

# Alone, or ranks that hold the same weights; others split them, as those do that divide experts.
WHOLE_MODEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class UnderWay(Protocol):
    """Samplings that are asked for ahead of their turn."""

    def state(self) -> dict[str, Any]:
        """What is under way, once it is there."""

    def load(self, state: dict[str, Any]) -> None:
        """Takes up what `state` gave."""

    def close(self) -> None:
        """Ends it, and the processes that it takes."""


class Pass(NamedTuple):
    """What goes through the model: ids and mask (B, P + T), of which the last `width` are the answers, `chunk` rows at once."""

    model: torch.nn.Module
    ids: torch.Tensor
    mask: torch.Tensor
    width: int
    chunk: int

    def of(self, rows: list[int], lengths: list[int], multiple: int) -> Pass:
        """These rows alone, at once, without columns that only longer answers reach; `lengths` are those of all answers."""
        width = min(self.width, -(-max(lengths[row] for row in rows) // multiple) * multiple)
        end = self.ids.shape[1] - self.width + width
        place = torch.tensor(rows, device=self.ids.device)
        return Pass(self.model, self.ids[place, :end], self.mask[place, :end], width, len(rows))

    def stub(self) -> Pass:
        """The last token of a prompt and the first of its answer, seen also where an answer is masked."""
        ids = self.ids[:1, -self.width - 1 :][:, :2]
        return Pass(self.model, ids, torch.ones_like(ids), 1, 1)


class RolloutTrainer(ReferenceTrainer, GRPOTrainer):
    """TRL's GRPOTrainer with our prompts and rewards; `take` gives it its rewards."""

    args: GRPOConfig
    num_generations: int
    num_generations_eval: int
    samples_answers = True
    rewards: Rewards
    groups: KeptGroups
    rewards_note: str
    not_recorded: str
    """Why answers are not sampled with a static cache; empty where they are."""
    holds_all: bool
    """Whether each process holds all weights, and passes of the model are its own affair."""
    sampled_together: int
    """Batches that one sampling serves."""
    ahead: UnderWay | None = None
    """What is asked for ahead of its turn; None where answers are sampled when their turn comes."""
    reroll: Reroll | None = None
    """What has prompts come back on which every answer failed; None where they do not."""
    replay: ReplayBuffer | None = None
    """Groups that may be trained on again; None where none are kept."""
    skipped_tokens = 0
    """Tokens of answers and their prompts, on all processes, that were left out of passes of the loss so far."""

    def take(self, config: RunConfig, rewards: Rewards, note: str) -> None:
        """Call it in `build`: the rewards of the run, how many groups are kept, and the buffer as part of its state."""
        self.rewards, self.rewards_note = rewards, note
        self.sampled_together = cast(int, self.args.steps_per_generation)  # which GRPOConfig fills in
        self.groups = KeptGroups(self, method_of(config, Rollouts).rollout_groups)
        self.holds_all = self.accelerator.distributed_type in WHOLE_MODEL and not is_divided(self.model)
        self.shares_prompts = can_share(config, base_model(self.model), self.holds_all)
        self.not_recorded = refused(config, base_model(self.model), self.holds_all)
        ends = end_of_turn(self._tokenizer, chat_of(config, self.processing_class))
        stops = stop_ids(self.model, self._tokenizer, ends)
        self.eos_token_ids = self.generation_kwargs["eos_token_id"] = stops
        self.generation_config.eos_token_id = stops
        self.register_state("rollouts", Buffer(self))
        processor = images_of(self.processing_class) if learns_from_images(config.method.kind) else None
        self.images = None if processor is None else ImageBatch(processor, config.data.image_cache_size << 20)
        if self.images is not None:
            # TRL leaves out the token of an image: sampled, it would be a place without an image. Others are such places too.
            videos = getattr(self.model.config, "video_token_id", None)
            never = sorted(self.images.ids | ({videos} if videos is not None else set()))
            self.generation_kwargs["suppress_tokens"] = self.generation_config.suppress_tokens = never

    def hold_to(self, reference: PreTrainedModel | None, beta: float) -> None:
        """The reference, a frozen copy or None for the model without its adapter, and what it weighs.

        TRL would load a copy by name, or hold a second adapter; both are kept out by building it with a beta of 0. Where
        training goes on from an adapter and is held to it, its copy joins here.
        """
        self.beta = beta
        if reference is not None:
            add_fused_lm_head(reference, temperature=self.temperature)
            reference = self.accelerator.prepare_model(reference, evaluation_mode=True)
        self.ref_model = reference

    def built(self, notes: Notes) -> Built:
        return replace(super().built(notes), shares_prompts=self.shares_prompts)

    def receipt_note(self) -> str:
        """What the receipt adds about the loss."""
        note, size, together = self.rewards_note, self.num_generations, self.sampled_together
        # Ranks sample side by side, so a group may begin on one and end on the next.
        groups_stay = self.args.per_device_train_batch_size * together % size == 0
        if self.shares_prompts and size > 1 and groups_stay:
            # Where a sampling serves several batches, TRL mixes the answers before it splits them: groups are torn apart.
            whole = together == 1
            where = " where it is long enough to earn the pass" if self.accelerator.device.type == "cuda" else ""
            note += f"; a prompt is computed once for all its answers in sampling{' and in the loss' if whole else ''}{where}"
        how = f"as keys and values grow: {self.not_recorded}" if self.not_recorded else "with a static cache"
        note += f"; answers are sampled {how}"
        return f"{note}; {self.reference_note() if self.beta else 'no reference'}"

    @property
    def mode(self) -> str:
        """Where TRL keeps numbers until they are logged: `train` or `eval`."""
        return "train" if self.model.training else "eval"

    # -- TRL's moments -------------------------------------------------------------------------------------------------
    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.ahead is not None:
                self.ahead.close()  # which may be asking for rewards
            self.rewards.close()
            self.groups.close()

    def training_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The rows become a batch in `_prepare_inputs`, so they are counted there."""
        return self.finite.loss(super(RunTrainer, self).training_step(model, inputs, *args, **kwargs))

    def prediction_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super(RunTrainer, self).prediction_step(model, inputs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Held-out prompts are answered by random numbers of their own, the same at each look: a look changes no training, and
        what changes from look to look is the model."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.args.seed + self.args.process_index)
            return super().evaluation_loop(*args, **kwargs)

    def _prepare_inputs(self, rows: Any) -> Any:
        batch = super()._prepare_inputs(rows)
        if self.shares_prompts:
            batch = side_by_side(batch)
        self._shown = batch.get("shown", [])
        if self.mode == "train":
            self._trains_on(batch["row"].tolist())
            prompts, trained = batch["prompt_mask"].sum(), batch["completion_mask"].sum()
            # answers that were cut off are read, also where their mask leaves them out of the loss
            self.counts.add(prompts + batch["length"].sum().to(prompts.device), trained)
        return batch

    def _dealt(self) -> Dealt:
        """Prompts as TRL's sampler repeats them: for each answer of a group, and for each batch made of one sampling."""
        args, together = self.args, self.args.steps_per_generation or 1
        each, times = args.per_device_train_batch_size * together, self.num_iterations * together
        return Dealt(each, args.world_size, args.process_index, self.num_generations, times)

    def _get_train_sampler(self, dataset: Any = None) -> RepeatSampler:
        theirs = cast(RepeatSampler, super()._get_train_sampler(dataset))
        return EpochSampler(
            theirs.data_source,
            theirs.mini_repeat_count,
            theirs.batch_size,
            theirs.repeat_count,
            theirs.shuffle,
            theirs.seed,
        )

    def _generate_and_score_completions(self, inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        rows = [
            {
                "prompt": prompt_of(row),
                "columns": reward_columns(row),
                "row": row["row"],
                "prompt_ids": list(row["prompt_ids"]),
            }
            for row in inputs
        ]
        self._asked, self._shown = rows, [list(row.get("images") or ()) for row in inputs]
        output: dict[str, Any] = super()._generate_and_score_completions(rows)
        output = self._with_advantages(output)
        if self.images is not None:
            output["shown"] = self._shown
        output["row"] = torch.tensor([row["row"] for row in rows])
        output["length"] = torch.tensor([len(ids) for ids in self._answers[0]])
        output["tokens"] = output["length"] + torch.tensor([len(row["prompt_ids"]) for row in rows])
        if self.writer is not None and self.mode == "train":
            self.groups.write(output, self.writer)
        return output

    def _with_advantages(self, output: dict[str, Any]) -> dict[str, Any]:
        """What was sampled with its advantages, before anybody sees it; TRL's own unless a method has others."""
        return output

    def _tokenize_prompts(self, prompts: Any) -> tuple[list[list[int]], None, dict[str, Any]]:
        """The ids that were prepared, and the tensors of their images; TRL would render the template again."""
        ids = [row["prompt_ids"] for row in self._asked]
        if self.images is None:
            return ids, None, {}
        width, pad = max(map(len, ids)), self._tokenizer.pad_token_id
        return ids, None, self.images(self._shown, torch.tensor([[pad] * (width - len(each)) + each for each in ids]))

    def _generate(self, prompts: Any) -> Any:
        made = super()._generate(prompts)
        self._answers = (made[1], made[3])
        return made

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> Any:
        given = (prompt_ids, images, multimodal_fields, num_generations, has_tool_images)
        # beside other ranks a batch may end within a group
        whole = len(prompt_ids) % num_generations == 0 and all(
            ids == prompt_ids[place - place % num_generations] for place, ids in enumerate(prompt_ids)
        )
        model = self.accelerator.unwrap_model(self.model_wrapped)
        with without_router_loss(model), kept_together(model), _recorded(self, model):
            shared = self.shares_prompts and num_generations > 1 and whole and min(map(len, prompt_ids)) > 1
            longest = max(map(len, prompt_ids))
            if not (shared and is_worth_a_pass(base_model(model), len(prompt_ids), longest, num_generations)):
                return super()._generate_single_turn(*given)
            with torch.no_grad(), sampling_once(model, base_model(model).base_model, num_generations):
                return super()._generate_single_turn(*given)

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: int,
        batch_size: Any = None,
        **more: Any,
    ) -> Any:
        """TRL's arguments, which are named here alone."""
        given = Pass(model, input_ids, attention_mask, logits_to_keep, batch_size or len(input_ids))
        return self.read_logps(given, **more)

    def read_logps(self, given: Pass, **more: Any) -> Any:
        """Log-probabilities (B, T), entropies where asked for, and no auxiliary loss; the prompts shared where they can be."""
        model, width = given.model, given.width
        prompt = given.ids.shape[1] - width
        special = any(
            value is not None and value is not False for name, value in more.items() if name != "compute_entropy"
        )
        each = 1
        if self.shares_prompts and prompt > 1 and not special:
            each = answers_per_prompt(given.ids[:, :prompt], given.mask[:, :prompt])
        of = base_model(self.accelerator.unwrap_model(model))
        if each == 1 or given.chunk % each or not is_worth_a_pass(of, given.chunk, prompt, each):
            seen = seeing(model, self.images, self._shown) if self.images else model
            return super()._get_per_token_logps_and_entropies(seen, given.ids, given.mask, width, given.chunk, **more)
        plain = self.accelerator.unwrap_model(model)
        base = base_model(plain).base_model
        with self.accelerator.autocast(), without_router_loss(plain):
            parts = [
                read_answers(model, base, ids, mask, width, each)
                for ids, mask in zip(given.ids.split(given.chunk), given.mask.split(given.chunk), strict=True)
            ]
        entropies = torch.cat([found for _, found in parts]) if more.get("compute_entropy") else None
        return torch.cat([found for found, _ in parts]), entropies, None

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        self._scores: torch.Tensor = super()._calculate_rewards(*args)
        if self.state.global_step == 0 and torch.isnan(self._scores).all():
            raise WorkbenchError(
                f"method.reward_funcs: none of the rewards applies to any of the {len(self._scores)} answers that were "
                "sampled first, so nothing can be learned from them.",
                "Let one return a number for them: 0 for an answer that is bad.",
            )
        return self._scores


Kind = TypeVar("Kind", bound=RolloutTrainer)


@contextlib.contextmanager
def _recorded(trainer: RolloutTrainer, model: Any) -> Iterator[None]:
    """Inside, answers are sampled with a static cache where the run's config and model allow it."""
    if trainer.not_recorded:
        yield
        return
    with sampling_recorded(model, base_model(model), cast(int, trainer.max_completion_length)) as passes:
        yield
    if passes and passes[-1].reason:
        trainer.not_recorded = f"a token's pass could not be recorded: {passes[-1].reason}"
        if trainer.writer is not None:
            message = (
                f"method.cache_implementation: {trainer.not_recorded}. Answers are sampled as with dynamic from now on."
            )
            finding = {"path": "method.cache_implementation", "severity": "warning", "rule": "sampling-not-recorded"}
            trainer.writer.write("finding", **finding, message=message)


class EpochSampler(RepeatSampler):
    """TRL's sampler whose order in an epoch depends on that epoch alone, not on how often it was begun."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the loader before each epoch."""
        self.epoch = epoch
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) + epoch)


class Buffer:
    """What was sampled and is not used up: batches, and the place in them. Each checkpoint's numbers are logged before it."""

    def __init__(self, trainer: RolloutTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Tensors as they are; empty where the next step samples anew."""
        trainer = self._trainer
        used_up = trainer._step % (trainer.sampled_together * trainer.num_iterations) == 0
        return {
            "step": trainer._step,
            "skipped_tokens": trainer.skipped_tokens,
            "reroll": None if trainer.reroll is None else trainer.reroll.state_dict(),
            "replay": None if trainer.replay is None else trainer.replay.state_dict(),
            "batches": [] if used_up else trainer._buffered_inputs or [],
            "ahead": {} if trainer.ahead is None else trainer.ahead.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what was saved, on the trainer's device; what was sampled for other batches is left."""
        trainer = self._trainer
        if not self._fits(state["step"], state["batches"]):
            self.load_of_others(state)
            return
        trainer._step = state["step"]
        if trainer.ahead is not None:
            trainer.ahead.load(state.get("ahead", {}))
        self._load_shared(state)
        trainer._buffered_inputs = send_to_device(state["batches"], trainer.accelerator.device) or None

    def load_of_others(self, state: dict[str, Any]) -> None:
        """Leaves what was sampled, which is a part of what all of them had: the prompts are answered anew."""
        self._trainer._step, self._trainer._buffered_inputs = 0, None
        self._load_shared(state)

    def _fits(self, step: int, batches: list[dict[str, Any]]) -> bool:
        """Whether a run with these settings goes on in the middle of it: settings may change before a resume."""
        trainer = self._trainer
        if not batches:
            return bool(step % (trainer.sampled_together * trainer.num_iterations) == 0)
        if trainer.beta and "ref_per_token_logps" not in batches[0]:
            return False
        size = trainer.args.per_device_train_batch_size
        return len(batches) == trainer.sampled_together and all(len(batch["row"]) == size for batch in batches)

    def _load_shared(self, state: dict[str, Any]) -> None:
        """Takes up what is the same on all processes; earlier versions have not saved it."""
        trainer = self._trainer
        trainer.skipped_tokens = state.get("skipped_tokens", 0)
        if trainer.reroll is not None:
            trainer.reroll.load_state_dict(state.get("reroll") or {"waiting": state.get("waiting", [])})
        if trainer.replay is not None and (replay := state.get("replay")):
            trainer.replay.load_state_dict(replay)


class KeptGroups:
    """The first groups of each sampling, whole, for people to look at: `count` of them, into the run's file and its events."""

    def __init__(self, trainer: RolloutTrainer, count: int) -> None:
        self._trainer, self.count = trainer, count
        self._file: RolloutFile | None = None

    def write(self, output: dict[str, Any], writer: AsyncWriter) -> None:
        """Those of what was sampled last."""
        trainer = self._trainer
        size = trainer.num_generations
        count = min(self.count, len(trainer._asked) // size)
        if not count:
            return
        advantages = _advantage_per_answer(output["advantages"], output["completion_mask"])
        scores = trainer._scores[: count * size].tolist()  # at once: each look at a device's number waits for it
        for number in range(count):
            self.add(self._group(number, range(number * size, (number + 1) * size), scores, advantages), writer)

    def add(self, group: Group, writer: AsyncWriter) -> None:
        """One group into the file, and its event unless the file is full."""
        file = self._file = self._file or RolloutFile(self._trainer.run)
        if (payload := file.add(group)) is not None:
            # by the writer's thread: a step does not wait for the disk
            writer.defer("rollout", partial(dict, payload))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _group(self, number: int, places: range, scores: list[list[float]], advantages: list[float]) -> Group:
        trainer = self._trainer
        row, (ids, texts), rewards = trainer._asked[places[0]], trainer._answers, trainer.rewards
        ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        answer = row["columns"].get("answer")
        completions = []
        for place in places:
            found = [None if score != score else score for score in scores[place]]
            applying = [
                score * weight for score, weight in zip(found, rewards.weights, strict=True) if score is not None
            ]
            completions.append(
                Completion(
                    text=text_of(texts[place]),
                    tokens=len(ids[place]),
                    rewards=dict(zip(rewards.names, found, strict=True)),
                    reward=sum(applying) if applying else None,
                    advantage=advantages[place],
                    cut_off=ids[place][-1] not in ends,
                )
            )
        step = trainer.state.global_step + 1
        return Group(
            step, number, row["row"], text_of(row["prompt"]), None if answer is None else str(answer), completions
        )


class RewardFunction:
    """One reward as TRL calls it: named, and given the columns of the rows."""

    def __init__(self, rewards: Rewards, place: int) -> None:
        self.rewards, self.place = rewards, place
        self.__name__ = rewards.names[place]

    def __call__(
        self, prompts: Any, completions: Any, completion_ids: Any, columns: Any, row: Any, **_: Any
    ) -> list[float]:
        if (made := self.rewards.made_ahead(self.place, completions)) is not None:
            return made
        found = self.rewards.one(self.place, prompts, completions, completion_ids, columns_of(columns), row)
        return found.tolist()


def tried(config: RunConfig, train: Any, tokenizer: Any) -> tuple[Rewards, str]:
    """The rewards of a config after their first call, and what the receipt says of them.

    Raises WorkbenchError naming the reward and the row for one that cannot be loaded or fails on the first rows.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = method_of(config, Rollouts)
    rewards = Rewards(settings.reward_funcs, settings.reward_timeout, device)
    try:
        own = rewards.dry_run(train, getattr(tokenizer, "tokenizer", tokenizer))
    except BaseException:
        rewards.close()
        raise
    words = [f"{name} x {weight:g}" for name, weight in zip(rewards.names, rewards.weights, strict=True)]
    if not len(own):
        return rewards, f"rewards: {', '.join(words)} (the first rows hold no answers to try them on)"
    told = ["none it applies to" if score != score else f"{score:.2f}" for score in own.nanmean(0).tolist()]
    words = [f"{word} (first rows' own answers: {score})" for word, score in zip(words, told, strict=True)]
    return rewards, f"rewards: {', '.join(words)}"


def rollout_arguments(config: RunConfig, run_folder: str | Path, **more: Any) -> GRPOConfig:
    """What all methods with rewards share, as TRL's config. The reference joins after building (`hold_to`)."""
    method = method_of(config, Rollouts)
    return GRPOConfig(
        **shared_arguments(config, run_folder),
        max_completion_length=method.max_completion_length,
        temperature=method.temperature,
        top_p=method.top_p,
        top_k=method.top_k,
        repetition_penalty=method.repetition_penalty,
        num_iterations=method.num_iterations,
        steps_per_generation=method.steps_per_generation,
        epsilon=method.epsilon,
        epsilon_high=method.epsilon_high,
        beta=0.0,
        shuffle_dataset=config.data.shuffle,
        **more,
    )


def built(kind: type[Kind], args: GRPOConfig, job: Job) -> Kind:
    """The trainer of this class with its rewards tried and its reference in place, ready to `attach`."""
    config = job.config
    _refuse_too_few(args, len(job.train))
    rewards, note = tried(config, job.train, job.processing_class)
    trainer = _with_rewards(kind, args, job, rewards, note)
    if reference_of(config.method) == "adapter_copy":
        copy_adapter(cast(PeftModel, trainer.model))
    trainer.hold_to(frozen_copy(config), method_of(config, Rollouts).beta)
    return trainer


def sampler_of(kind: type[Kind], args: GRPOConfig, job: Job) -> Kind:
    """A trainer of this class that samples and never trains: its rewards are asked nothing, and there is no reference."""
    settings = method_of(job.config, Rollouts)
    rewards = Rewards(settings.reward_funcs, settings.reward_timeout, torch.device("cpu"))
    return _with_rewards(kind, args, job, rewards, "")


def _with_rewards(kind: type[Kind], args: GRPOConfig, job: Job, rewards: Rewards, note: str) -> Kind:
    args.reward_weights = rewards.weights
    arguments = job.trainer_arguments(
        reward_funcs=[RewardFunction(rewards, place) for place in range(len(rewards.specs))]
    )
    del arguments["data_collator"]  # TRL hands prompts on as they are
    trainer = kind(args=args, **arguments)
    trainer.take(job.config, rewards, note)
    return trainer


def _refuse_too_few(args: GRPOConfig, prompts: int) -> None:
    """TRL leaves out prompts that do not fill a sampling, and a run without one would end at once as if it had finished.

    A rule says so before launch, but rows that are left out while they are prepared are known here alone.
    """
    needed = (args.generation_batch_size or 0) // (args.num_generations or 1)
    if prompts < needed:
        raise WorkbenchError(
            f"data.train: there must be at least the {needed} prompts that are sampled together; got {prompts} after "
            "preparation, so there would be no step.",
            "Take more prompts or a larger data.max_length, or sample fewer together with a smaller "
            "optim.gradient_accumulation_steps or optim.per_device_train_batch_size.",
        )


def seeing(model: torch.nn.Module, images: ImageBatch, shown: Sequence[Sequence[str]]) -> Any:
    """The model, each pass of which is given the images of its rows; `shown` are those of all rows to come, in order."""
    left = iter(shown)

    def see(input_ids: torch.Tensor, **more: Any) -> Any:
        own = images(list(islice(left, len(input_ids))), input_ids)
        return model(input_ids=input_ids, **send_to_device(own, input_ids.device), **more)

    return see


def prompt_of(row: dict[str, Any]) -> Any:
    """The prompt of a row as rewards are given it: a text, or messages."""
    return json.loads(row["prompt"])


def text_of(message: Any) -> str:
    """A text as it is, or what the messages say, one below the other."""
    return message if isinstance(message, str) else "\n\n".join(map(written, message))


def _advantage_per_answer(advantages: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """One advantage an answer: the mean over its tokens where each token has its own."""
    if advantages.dim() > 1:
        advantages = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
    return advantages.tolist()
