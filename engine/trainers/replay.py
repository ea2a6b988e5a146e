"""GRPO and GDPO with a replay buffer: groups that teach nothing give their place to groups that taught something before.

A group whose answers all get the same reward has a gradient of zero. Where most groups are such, a batch is mostly spent in
vain, and `method.replay_buffer_size` puts groups of earlier samplings there, drawn by score (`replay_buffer.py`). What was
sampled stays what rewards, lengths and groups are counted by: a replay is no answer of the model as it is now, and no curve of
rewards has it in.

**Which policy a replayed token's ratio is taken to.** To the one that gave the answer: its log-probabilities are computed
when the group is sampled, by the weights that sampled it, and kept with the group. In each loss here the ratio of new to old
probability is the importance weight that corrects for answers of another policy (PPO, arXiv:1707.06347, equation 6; RePO keeps
them likewise for off-policy answers, arXiv:2506.09340), and the clip bounds how far a token moves from where it was sampled, over
all its uses. Old log-probabilities that are computed anew by the present weights, as Axolotl does by default
(`replay_recompute_logps`), make every ratio 1 however old the answer is: nothing corrects, nothing clips, and a group that is
replayed ten times is pushed ten times. They are right as the policy that the clip is centred on only beside a weight of present to
behaviour policy (arXiv:2110.00641), which needs the kept ones too. So nothing is computed anew, and a replay costs no pass.

Answers that were sampled just now keep a ratio of exactly 1 in their first step: where TRL computes no old log-probabilities
(all answers are used up before the weights move), theirs are the new ones, detached, as without a buffer.

Ranks sample side by side and a group may lie on two of them, so groups are put together from all ranks when they are stored, and
each rank holds the same buffer. Leaves out no answer itself: what teaches is `zero_advantage.py`'s affair.

Shapes: B answers of this process, G answers a group, P tokens of the longest prompt, T of the longest answer.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn.functional import pad

from engine import figures
from engine.config.rollouts import Groups
from engine.config.tree import RunConfig, method_of
from engine.planning.memory_model import replay_bytes
from engine.rewards.scoring import Rewards
from engine.run.rollouts import Completion, Group
from engine.trainers.replay_buffer import FitsRun, ReplayBuffer, StoredGroup, spread
from engine.trainers.rollouts import text_of
from engine.trainers.zero_advantage import GroupTrainer

LEFT = ("prompt_ids", "prompt_mask")
"""Tensors of a batch that are padded left, (B, P)."""
OLD, KEPT_OLD = "old_per_token_logps", "replayed_logps"
"""TRL's log-probabilities of the policy that sampled, and those of replayed answers where TRL has none: (B, T)."""
REFERENCE = "ref_per_token_logps"
SAMPLED, WEIGHT = "sampling_per_token_logps", "importance_sampling_ratio"
"""TRL's where others sample than the present weights: their log-probabilities (B, T), and the weight of present to theirs, (B, T)
or (B, 1). A replayed answer's ratio is to its sampler already, so its weight is 1."""


class ReplayTrainer(GroupTrainer):
    """What GRPO and GDPO have of a replay buffer; without one each step is what it would be without this class."""

    _ratios: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """While a loss with replays is computed: old log-probabilities to fill, which rows are replayed, and theirs."""

    def take(self, config: RunConfig, rewards: Rewards, note: str) -> None:
        super().take(config, rewards, note)
        method = method_of(config, Groups)
        if not method.replay_buffer_size:
            return
        longest = config.data.max_length, method.max_completion_length
        fits = FitsRun(method.num_generations, *longest, bool(method.beta), list(method.reward_funcs))
        self.replay = ReplayBuffer(method.replay_buffer_size, method.replay_max_age, self.args.seed, fits)
        self._room = replay_bytes(config)

    def receipt_note(self) -> str:
        """What the receipt adds about the loss."""
        note = super().receipt_note()
        if (buffer := self.replay) is None:
            return note
        return (
            f"{note}; groups that teach nothing give their place to earlier ones, drawn by score from the best {buffer.size:,} "
            f"of the last {buffer.max_age:,} steps, with ratios to the model that gave them "
            f"(at most {figures.size(self._room)} of main memory a process, and of each checkpoint)"
        )

    def compared(self, scores: torch.Tensor) -> torch.Tensor:
        """(answers, columns): what answers of a group are told apart by, NaN where there is none. `scores` is (answers, rewards)."""
        return self._totals(scores)[:, None]

    # -- storing and replaying -----------------------------------------------------------------------------------------
    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.replay is not None and self.mode == "train":
            self._replay(self.replay, output)
        return output

    def _replay(self, buffer: ReplayBuffer, output: dict[str, Any]) -> None:
        """Puts earlier groups in place of those that teach nothing, and keeps those that do."""
        size, step = self.num_generations, self.state.global_step
        trained = output["completion_mask"].sum(1).to(output["advantages"])
        of_all = self.accelerator.gather(torch.stack([output["advantages"], trained], 1)).double().cpu()
        alike = self.alike(self._scores, size).cpu().repeat_interleave(size)
        advantages = of_all[:, 0].masked_fill(alike | (of_all[:, 1] == 0), 0.0).abs().view(-1, size).mean(1)
        scores = (advantages * spread(self.compared(self._scores).cpu(), size)).tolist()
        buffer.drop_old(step)
        lacking = [group for group, score in enumerate(scores) if not score]
        taught = [group for group, score in enumerate(scores) if score]
        drawn = dict(zip(lacking, buffer.draw(len(lacking)), strict=False))
        kept = [taught[place] for place in buffer.admitted([scores[group] for group in taught])]
        fresh = self._put_together(output, kept, scores) if kept else []
        if drawn:
            tokens = of_all[:, 1].view(-1, size).sum(1)
            self._put_in(output, drawn, sum(float(tokens[group]) for group in drawn))
            self._show(drawn)
        for group in fresh:
            buffer.add(group)
        metrics = self._metrics["train"]
        metrics["replay/share"].append(len(drawn) / len(scores))
        if drawn:
            metrics["replay/age"].append(sum(step - group.step for group in drawn.values()) / len(drawn))
        metrics["replay/kept"].append(len(buffer))
        metrics["replay/bytes"].append(buffer.bytes)

    def _first(self, output: dict[str, Any]) -> int:
        """The number of this process's first answer among those of all."""
        return self.accelerator.process_index * len(output["advantages"])

    def _put_together(self, output: dict[str, Any], kept: list[int], scores: list[float]) -> list[StoredGroup]:
        """Groups of this sampling, by number, from the answers of all processes."""
        size, first, wanted = self.num_generations, self._first(output), set(kept)
        places = [place for place in range(len(output["advantages"])) if (first + place) // size in wanted]
        logps = self._logps_of(output, places).float().cpu()
        reference = output[REFERENCE].float().cpu() if REFERENCE in output else None
        counted, advantages = output["completion_mask"].any(1).tolist(), output["advantages"].tolist()
        own = []
        for place in places:
            ids = self._answers[0][place]
            answer = {
                "ids": torch.tensor(ids, dtype=torch.int32),
                "logps": logps[place, : len(ids)].clone(),
                "reference": None if reference is None else reference[place, : len(ids)].clone(),
                "advantage": advantages[place],
                "counted": counted[place],
            }
            row = self._asked[place]
            prompt = (row["row"], row["prompt_ids"], text_of(row["prompt"]), row["columns"].get("answer"))
            own.append((first + place, answer, (*prompt, self._shown[place]) if (first + place) % size == 0 else None))
        found = {number: (answer, prompt) for number, answer, prompt in gather_object(own)}
        rewards = self._scores.tolist()
        return [
            self._group([found[number] for number in range(group * size, (group + 1) * size)], scores[group], rewards[group * size :])
            for group in kept
        ]  # fmt: skip

    def _group(self, found: list[Any], score: float, rewards: list[list[float]]) -> StoredGroup:
        answers = [answer for answer, _ in found]
        row, prompt_ids, prompt, reference_answer, images = found[0][1]
        has_reference = answers[0]["reference"] is not None
        return StoredGroup(
            row=row,
            step=self.state.global_step,
            score=score,
            prompt_ids=torch.tensor(prompt_ids, dtype=torch.int32),
            lengths=[len(answer["ids"]) for answer in answers],
            ids=torch.cat([answer["ids"] for answer in answers]),
            logps=torch.cat([answer["logps"] for answer in answers]),
            reference=torch.cat([answer["reference"] for answer in answers]) if has_reference else None,
            advantages=[answer["advantage"] for answer in answers],
            counted=[answer["counted"] for answer in answers],
            rewards=rewards[: len(answers)],
            images=list(images),
            prompt=prompt,
            answer=None if reference_answer is None else str(reference_answer),
        )

    def _logps_of(self, output: dict[str, Any], places: list[int]) -> torch.Tensor:
        """(B, T): what the model that sampled gives the tokens of these answers; TRL's where it has them."""
        if SAMPLED in output or OLD in output:
            found: torch.Tensor = output[SAMPLED if SAMPLED in output else OLD]
            return found
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        if self.computes_all:  # as many rows as ever: compiled layers would be compiled anew
            places = list(range(len(ids)))
        self._waiting = (
            self.model,
            ids,
            mask,
            output["completion_ids"].shape[1],
            self.args.per_device_train_batch_size,
        )
        return self._sampled_logps(places)

    def _put_in(self, output: dict[str, Any], drawn: dict[int, StoredGroup], tokens: float) -> None:
        """Makes the answers of the groups `drawn`, by number, those of earlier ones; they had `tokens` that count, on all
        processes."""
        size, first = self.num_generations, self._first(output)
        numbers = [divmod(first + place, size) for place in range(len(output["advantages"]))]
        places = [place for place, (number, _) in enumerate(numbers) if number in drawn]
        own = [(drawn[number], which) for number, which in (numbers[place] for place in places)]
        self._widen(output, [group for group, _ in own])
        if OLD not in output:
            output[KEPT_OLD] = torch.zeros_like(output["completion_mask"], dtype=torch.float32)
        output["replayed"] = torch.zeros(len(numbers), dtype=torch.bool)
        if own:
            whole = self.shares_prompts and self.sampled_together == 1
            for name, rows in self._rows_of(own, output, whole).items():
                output[name][torch.tensor(places, device=output[name].device)] = rows.to(output[name])
        if "shown" in output:
            for place, (group, _) in zip(places, own, strict=True):
                output["shown"][place] = list(group.images)
        counted = sum(
            length
            for group in drawn.values()
            for length, counts in zip(group.lengths, group.counted, strict=True)
            if counts
        )
        output["num_items_in_batch"] = output["num_items_in_batch"] + int(counted - tokens)

    def _rows_of(
        self, own: list[tuple[StoredGroup, int]], output: dict[str, Any], whole: bool
    ) -> dict[str, torch.Tensor]:
        """What stands in a batch for these answers of groups, by its name, on the host: as wide as that of `output`. `whole`:
        an answer of a group that teaches goes through the model with the others."""
        prompt, answer = output["prompt_ids"].shape[1], output["completion_ids"].shape[1]
        fill = self._tokenizer.pad_token_id
        prompts = [group.prompt_ids for group, _ in own]
        answers = [group.of(which, group.ids) for group, which in own]
        lengths = torch.tensor([len(each) for each in answers])
        counted = torch.tensor([group.counted[which] for group, which in own])
        advantages = torch.tensor([group.advantages[which] for group, which in own], dtype=torch.float64)

        def right(parts: list[torch.Tensor], value: float = 0.0) -> torch.Tensor:
            return torch.stack([pad(part, (0, answer - len(part)), value=value) for part in parts])

        old = right([group.of(which, group.logps) for group, which in own])
        rows = {
            "prompt_ids": torch.stack([pad(each, (prompt - len(each), 0), value=fill) for each in prompts]),
            "prompt_mask": torch.stack([pad(torch.ones_like(each), (prompt - len(each), 0)) for each in prompts]),
            "completion_ids": right(answers, fill),
            "completion_mask": (torch.arange(answer) < lengths[:, None]) & counted[:, None],
            OLD if OLD in output else KEPT_OLD: old,
            "advantages": advantages,
            "row": torch.tensor([group.row for group, _ in own]),
            "length": lengths,
            "tokens": lengths + torch.tensor([len(each) for each in prompts]),
            "replayed": torch.ones(len(own), dtype=torch.bool),
        }
        if REFERENCE in output:
            rows[REFERENCE] = right(
                [group.of(which, group.reference) for group, which in own if group.reference is not None]
            )
        if SAMPLED in output:
            rows[SAMPLED] = old
        if WEIGHT in output:
            rows[WEIGHT] = torch.ones(len(own), output[WEIGHT].shape[1])
        if "teaches" in output:
            rows["teaches"] = (advantages != 0) & counted | whole
        return rows

    def _widen(self, output: dict[str, Any], groups: list[StoredGroup]) -> None:
        """Has room for the longest prompt and answer of `groups`, in the multiples that TRL pads to; in tensors of its own."""
        multiple = int(self.pad_to_multiple_of or 1)
        prompt, answer = output["prompt_ids"].shape[1], output["completion_ids"].shape[1]
        left = max([0, *(-(-len(group.prompt_ids) // multiple) * multiple - prompt for group in groups)])
        right = max([0, *(-(-max(group.lengths) // multiple) * multiple - answer for group in groups)])
        for name in (*LEFT, "completion_ids", "completion_mask", OLD, REFERENCE, SAMPLED, WEIGHT):
            if name in output and (name != WEIGHT or output[name].shape[1] > 1):
                value = self._tokenizer.pad_token_id if name.endswith("_ids") else 0
                sides = (left, 0) if name in LEFT else (0, right)
                output[name] = pad(output[name], sides, value=value).clone()
        output["advantages"] = output["advantages"].clone()

    def _show(self, drawn: dict[int, StoredGroup]) -> None:
        """Keeps the first of the replayed groups to look at, marked as what they are."""
        if self.writer is None:
            return
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        names, weights = self.rewards.names, self.rewards.weights
        for number, group in list(drawn.items())[: self.groups.count]:
            completions = []
            for which in range(len(group.lengths)):
                ids = group.of(which, group.ids).tolist()
                found = [None if score != score else score for score in group.rewards[which]]
                applying = [score * weight for score, weight in zip(found, weights, strict=True) if score is not None]
                completions.append(
                    Completion(
                        text=self._tokenizer.decode(ids, skip_special_tokens=True),
                        tokens=len(ids),
                        rewards=dict(zip(names, found, strict=True)),
                        reward=sum(applying) if applying else None,
                        advantage=group.advantages[which],
                        cut_off=ids[-1] not in ends,
                    )
                )
            step = self.state.global_step + 1
            shown = Group(
                step, number, group.row, group.prompt, group.answer, completions, replayed_from=group.step + 1
            )
            self.groups.add(shown, self.writer)

    # -- the loss ------------------------------------------------------------------------------------------------------
    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if self.mode != "train" or KEPT_OLD not in inputs or not inputs["replayed"].any():
            return super()._compute_loss(model, inputs)
        old = torch.zeros_like(inputs[KEPT_OLD])
        self._ratios = (old, inputs["replayed"].to(old.device)[:, None], inputs[KEPT_OLD])
        try:
            return super()._compute_loss(model, {**inputs, OLD: old})
        finally:
            self._ratios = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._ratios is not None:
            old, replayed, theirs = self._ratios
            old.copy_(torch.where(replayed, theirs, found[0].detach().to(old.dtype)))
        return found
