"""Asynchronous GRPO: the answers and rewards of the samplings to come are made while the model trains on this one.

When a sampling's turn comes, those behind it are asked for, `prefetch_depth` of them, by the weights of that moment; then its
own answers, asked for so many samplings ago, are taken. What answers what follows from the step alone and never from the clock,
and each sampling draws by a seed of its own, a function of the run's seed and its place in the data: a run is the same however fast
its processes are, and answers that are asked for again are the same. A checkpoint waits for what is under way and holds it.

Answers are old then. TRL's importance sampling (`engine.compat.trl_correction`) weighs them by how much likelier they are now than
when they were sampled, both computed by passes over whole answers, so that it is about the weights and not about kernels.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from engine.compat.trl_correction import correcting
from engine.config.rollouts import Groups
from engine.config.tree import RunConfig, method_of
from engine.data.prompts import reward_columns
from engine.errors import WorkbenchError
from engine.rewards.scoring import Rewards, columns_of
from engine.trainers.generating_process import Answers, GeneratingProcess, answered
from engine.trainers.reroll import AGAIN
from engine.trainers.rollouts import EpochSampler, RolloutTrainer, prompt_of

Place = tuple[int, int]
"""A sampling by its epoch and its number in it."""


@dataclass(frozen=True)
class Asked:
    """A sampling that is asked for: its rows, one an answer, the seed that it draws by, and how many steps the weights had
    made that answer."""

    place: Place
    rows: list[dict[str, Any]]
    seed: int
    step: int

    @property
    def prompts(self) -> list[list[int]]:
        """The ids of the prompts, one list an answer."""
        return [list(row["prompt_ids"]) for row in self.rows]


class Scored(NamedTuple):
    """Completions as reward functions were given them, and what these said by their place, None where one does not apply."""

    completions: list[Any]
    values: dict[int, list[float | None]]


@dataclass
class Pending:
    """A sampling under way."""

    asked: Asked
    answers: Future[Answers]
    scored: Future[Scored]


class Source(Protocol):
    """Who answers."""

    note: str
    """In words, for the receipt."""

    def start(self) -> None:
        """Once, before the first question."""

    def prepare(self, step: int) -> int:
        """Is told that so many steps are made; returns how many the weights had made that answer from now on."""

    def begin(self, asked: Asked) -> Future[Answers]:
        """Has the answers made."""

    def state(self) -> dict[str, Any]:
        """What it would answer by next, where that is not the model as it is."""

    def load(self, state: dict[str, Any]) -> None:
        """Takes up what `state` gave."""

    def close(self) -> None:
        """What is under way is not wanted any more."""


class InThisProcess:
    """The trainer samples ahead by itself, between its steps; only the rewards are made meanwhile."""

    note = "answers are sampled by the training itself"

    def __init__(self, trainer: AheadTrainer) -> None:
        self._trainer = trainer

    def start(self) -> None:
        """There is nothing to start."""

    def prepare(self, step: int) -> int:
        return step

    def begin(self, asked: Asked) -> Future[Answers]:
        return answered(self._trainer.answers_to(asked.prompts, asked.seed))

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """There is nothing to take up."""

    def close(self) -> None:
        """There is nothing under way."""


class AheadTrainer(RolloutTrainer):
    """GRPO and GDPO: what asks for samplings before their turn, and weighs answers that are old by then."""

    ahead: Ahead | None = None
    vllm_importance_sampling_correction: bool
    use_vllm: bool
    _taken: Turn | None = None
    """The sampling whose answers are being scored."""
    _sampler: EpochSampler | None = None

    def take(self, config: RunConfig, rewards: Rewards, note: str) -> None:
        super().take(config, rewards, note)
        method = method_of(config, Groups)
        if method.async_prefetch == "none":
            return
        if self.accelerator.num_processes > 1 or not self.holds_all or self.images is not None:
            raise WorkbenchError(
                f"method.async_prefetch: {method.async_prefetch} needs one process that holds the whole model, and prompts of text.",
                "Set method.async_prefetch to none.",
            )
        source: Source = InThisProcess(self)
        if method.async_prefetch == "answers":
            source = GeneratingProcess(
                self, method.generation_timeout, method.weight_sync_steps, method.generation_device
            )
        self.ahead = Ahead(self, source, method.prefetch_depth, config.run.seed)

    def receipt_note(self) -> str:
        """What the receipt adds about the loss."""
        note = super().receipt_note()
        if (ahead := self.ahead) is not None:
            args = self.args
            note += f"; {ahead.source.note}, {ahead.depth} ahead, and their rewards computed meanwhile; old answers weighed by TRL's {args.vllm_importance_sampling_mode} "
            note += f"up to {args.vllm_importance_sampling_clip_max:g}"
        if (most := self.args.off_policy_mask_threshold) is not None:
            note += f"; bad answers that diverge by more than {most:g} are left out"
        return note

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self.ahead is not None:
            self.ahead.source.start()
        return super().train(*args, **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        self._sampler = cast(EpochSampler, super()._get_train_sampler(dataset))
        return self._sampler

    # -- sampling ------------------------------------------------------------------------------------------------------
    def chosen(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The prompts of a sampling, one an answer, where the data's next are these."""
        return list(rows)

    def prompts_of_turn(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The prompts of the sampling whose turn it is; those behind it are asked for where that is done ahead."""
        if self.ahead is None:
            return self.chosen(rows)
        assert self._sampler is not None
        self._taken = self.ahead.turn(rows, self._sampler)
        return self._taken.asked.rows

    @torch.no_grad()
    def answers_to(self, prompts: list[list[int]], seed: int) -> Answers:
        """Answers to prompts, as many in a row to each as a group has, drawn by this seed, and the log-probabilities
        of their tokens by the model as it is, at the temperature of sampling."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            ids, _ = super()._generate_single_turn(prompts, None, {}, self.num_generations)
        padded = functools.partial(pad, pad_to_multiple_of=cast("int | None", self.pad_to_multiple_of))
        parts = []
        for lists, side in ((prompts, "left"), (ids, "right")):
            rows = [torch.tensor(each) for each in lists]
            tokens = padded(rows, padding_value=self._tokenizer.pad_token_id, padding_side=side)
            parts.append((tokens, padded([torch.ones_like(row) for row in rows], padding_value=0, padding_side=side)))
        tokens, mask = (torch.cat(part, 1).to(self.accelerator.device) for part in zip(*parts, strict=True))
        again = cast("dict[str, Any] | None", self.args.gradient_checkpointing_kwargs)
        with disable_gradient_checkpointing(cast(PreTrainedModel, self.model), again):
            size, width = self.args.per_device_train_batch_size, parts[1][0].shape[1]
            logps, *_ = self._get_per_token_logps_and_entropies(self.model, tokens, mask, width, batch_size=size)
        found = logps.tolist()
        return Answers(ids, [row[: len(answer)] for row, answer in zip(found, ids, strict=True)])

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self._taken is not None:
            return self._taken.answers
        return super()._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if (taken := self._taken) is None:
            return super()._generate_and_score_completions(inputs)
        self.rewards.made = taken.scored
        try:
            with correcting(self):
                output = super()._generate_and_score_completions(inputs)
        finally:
            self._taken = self.rewards.made = None
        curves = self._metrics[self.mode]
        curves["prefetch/age"].append(self.state.global_step - taken.asked.step)
        curves["prefetch/wait_seconds"].append(taken.waited)
        curves["prefetch/above_cap"].append(self._above_cap(output))
        return output

    def _above_cap(self, output: Mapping[str, Any]) -> float:
        """The share of tokens, or of answers where these are weighed whole, whose weight met its bound."""
        mask = output["completion_mask"].bool()
        apart = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).masked_fill(~mask, 0.0)
        if self.args.vllm_importance_sampling_mode.startswith("sequence"):
            apart, mask = apart.sum(1), mask.any(1)
        above = (apart.exp() > self.args.vllm_importance_sampling_clip_max) & mask
        return (above.sum() / mask.sum().clamp(min=1)).item()

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if "importance_sampling_ratio" not in inputs:
            return cast(torch.Tensor, super()._compute_loss(model, inputs))
        with correcting(self):
            return cast(torch.Tensor, super()._compute_loss(model, inputs))


class Turn(NamedTuple):
    """The sampling whose turn it is, and the seconds that were waited for it."""

    asked: Asked
    answers: Answers
    scored: Scored
    waited: float


class Ahead:
    """The samplings under way, in the order of their turns."""

    def __init__(self, trainer: AheadTrainer, source: Source, depth: int, seed: int) -> None:
        self.source, self.depth = source, depth
        self._trainer, self._seed = trainer, seed
        self._pending: dict[Place, Pending] = {}
        self._scoring = ThreadPoolExecutor(1, "rewards")
        self._orders: dict[int, list[list[int]]] = {}
        # By a thread of its own: one tokenizer is not for two at a time.
        self._tokenizer: PreTrainedTokenizerBase = copy.deepcopy(trainer._tokenizer)

    def turn(self, rows: Sequence[dict[str, Any]], sampler: EpochSampler) -> Turn:
        """Asks for what comes behind these rows, and waits for what was asked for these. Raises WorkbenchError for answers or
        rewards that cannot be made."""
        trainer = self._trainer
        step = self.source.prepare(trainer.state.global_step)
        coming = list(self._coming(rows, sampler))
        places = [place for place, _ in coming]
        due = dict(coming)
        self._pending = {
            place: each for place, each in self._pending.items() if place in due and _asks(each.asked, due[place])
        }
        for place, asked in coming:
            if place not in self._pending:
                self._begin(Asked(place, trainer.chosen(asked), self._seed_of(place), step))
        current = self._pending.pop(places[0])
        began = time.monotonic()
        answers, scored = current.answers.result(), current.scored.result()
        return Turn(current.asked, answers, scored, time.monotonic() - began)

    def _begin(self, asked: Asked) -> None:
        answers = self.source.begin(asked)
        self._pending[asked.place] = Pending(asked, answers, self._scoring.submit(self._score, asked, answers))

    def _seed_of(self, place: Place) -> int:
        """The seed of a sampling."""
        return int.from_bytes(hashlib.sha256(f"{self._seed} {place[0]} {place[1]}".encode()).digest()[:7])

    # -- which prompts come --------------------------------------------------------------------------------------------
    def _coming(
        self, rows: Sequence[dict[str, Any]], sampler: EpochSampler
    ) -> Iterator[tuple[Place, Sequence[dict[str, Any]]]]:
        """The sampling of these rows and those behind it that are asked for: of this epoch and the next ones, as far as steps
        are left for them."""
        trainer, dataset, times = self._trainer, _rows(sampler), sampler.mini_repeat_count
        place = self._place(rows, sampler)
        yield place, rows
        epoch, number = place
        uses = trainer.sampled_together * trainer.num_iterations
        batches = (trainer.state.max_steps - trainer.state.global_step) * trainer.args.gradient_accumulation_steps
        for _ in range(min(self.depth, -(-batches // uses) - 1)):
            number += 1
            if number == len(self._order(epoch, sampler)):
                epoch, number = epoch + 1, 0
            prompts = [dataset[index] for index in self._order(epoch, sampler)[number]]
            yield (epoch, number), [prompt for prompt in prompts for _ in range(times)]

    def _place(self, rows: Sequence[dict[str, Any]], sampler: EpochSampler) -> Place:
        """Where in its epoch a sampling stands. What is under way comes first, else the order is looked through."""
        order, dataset = self._order(sampler.epoch, sampler), _rows(sampler)
        asked = [row["row"] for row in rows[:: sampler.mini_repeat_count]]
        near = [number for epoch, number in self._pending if epoch == sampler.epoch and number < len(order)]
        for number in (*near, *range(len(order))):
            if [dataset[index]["row"] for index in order[number]] == asked:
                return sampler.epoch, number
        raise AssertionError(f"the rows {asked} are no sampling of epoch {sampler.epoch}")

    def _order(self, epoch: int, sampler: EpochSampler) -> list[list[int]]:
        """The prompts of each sampling of an epoch, as numbers in the data set."""
        if epoch not in self._orders:
            once = EpochSampler(sampler.data_source, 1, sampler.batch_size, 1, sampler.shuffle, sampler.seed)
            once.set_epoch(epoch)
            prompts = list(once)
            size = sampler.batch_size
            self._orders = {number: order for number, order in self._orders.items() if number >= sampler.epoch}
            self._orders[epoch] = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        return self._orders[epoch]

    # -- rewards -------------------------------------------------------------------------------------------------------
    def _score(self, asked: Asked, answers: Future[Answers]) -> Scored:
        """What reward functions say of the answers. Reward models are asked when the answers' turn has come: they compute where
        the model trains."""
        ids, rewards = answers.result().ids, self._trainer.rewards
        prompts = [prompt_of(row) for row in asked.rows]
        completions = self._as_given(prompts, asked.prompts, ids)
        columns = columns_of([reward_columns(row) for row in asked.rows])
        rows = [row["row"] for row in asked.rows]
        values = {
            place: [None if score != score else score for score in scores.tolist()]
            for place, spec in enumerate(rewards.specs)
            if spec.kind != "model"
            for scores in [rewards.one(place, prompts, completions, ids, columns, rows)]
        }
        return Scored(completions, values)

    def _as_given(self, prompts: list[Any], prompt_ids: list[list[int]], ids: list[list[int]]) -> list[Any]:
        """Answers as TRL gives them to rewards (`_generate`). Where it gives others, rewards are asked again."""
        tokenizer = self._tokenizer
        if not is_conversational({"prompt": prompts[0]}):
            return list(tokenizer.batch_decode(ids, skip_special_tokens=True))
        if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
            tools = cast("list[Any]", self._trainer.tools)
            pairs = zip(prompt_ids, ids, strict=True)
            return [[parse_response(tokenizer, answer, prefix=prompt, tools=tools)] for prompt, answer in pairs]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": text}] for text in texts]

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """What is under way, with its answers and rewards, which are waited for, as numbers and texts. What cannot be answered
        is left out, with what is behind it: it is asked again, and says so then."""
        found: list[dict[str, Any]] = []
        size = self._trainer.num_generations
        for each in self._pending.values():
            try:
                answers, scored = each.answers.result(), each.scored.result()
            except WorkbenchError:
                break
            asked = each.asked
            own = {"place": list(asked.place), "rows": [dict(row) for row in asked.rows[::size]], "seed": asked.seed}
            own |= {"step": asked.step, "ids": answers.ids, "logps": answers.logps}
            found.append({**own, "completions": scored.completions, "rewards": self._named(scored)})
        return {"pending": found, "source": self.source.state()}

    def _named(self, scored: Scored) -> dict[str, list[float | None]]:
        return {self._trainer.rewards.specs[place].text: values for place, values in scored.values.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Takes up what `state` gave; what was sampled for other batches is left, and rewards that were changed are asked anew.
        What asks other prompts than are due by then is asked anew in its turn."""
        trainer, size = self._trainer, self._trainer.num_generations
        texts = [spec.text for spec in trainer.rewards.specs]
        self.source.load(state.get("source", {}))
        for each in state.get("pending", ()):
            rows = [row for row in each["rows"] for _ in range(size)]
            if len(each["ids"]) != trainer.args.generation_batch_size or len(rows) != len(each["ids"]):
                return
            place = (int(each["place"][0]), int(each["place"][1]))
            asked = Asked(place, rows, each["seed"], each["step"])
            answers = answered(Answers(each["ids"], each["logps"]))
            known = {texts.index(text): values for text, values in each["rewards"].items() if text in texts}
            if len(known) == sum(spec.kind != "model" for spec in trainer.rewards.specs):
                scored = answered(Scored(each["completions"], known))
            else:
                scored = self._scoring.submit(self._score, asked, answers)
            self._pending[place] = Pending(asked, answers, scored)

    def close(self) -> None:
        """Ends what is under way and waits for its end: processes are gone afterwards."""
        self.source.close()
        self._trainer.rewards.interrupt()
        self._scoring.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()


def _asks(asked: Asked, rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a sampling asks these prompts, but where one comes back: a run that goes on may have other rows by then."""
    return all(
        AGAIN in own or (own["row"] == row["row"] and list(own["prompt_ids"]) == list(row["prompt_ids"]))
        for own, row in zip(asked.rows, rows, strict=True)
    )


def _rows(sampler: EpochSampler) -> Sequence[dict[str, Any]]:
    """The rows that a sampler numbers."""
    return cast("Sequence[dict[str, Any]]", sampler.data_source)
