"""GRPO and GDPO with a replay buffer: groups that teach nothing give their place to groups that taught something before.

A group whose answers all get the same reward has a gradient of zero. Where most groups are such, a batch is mostly spent in
vain, and `method.replay_buffer_size` puts groups of earlier samplings there, drawn by score (`replay_buffer.py`). What was
sampled stays what rewards, lengths and groups are counted by: a replay is no answer of the model as it is now, and no curve of
rewards has it in.

**Two policies, and a replay needs both.** The one that gave an answer: what is learned from it is right on average only if each
token is weighed by how much likelier it is now (importance sampling). So its log-probabilities, by the weights that sampled it,
are kept with the group, and none that is computed later can take their place. The other is the one that a step is not to go
far from, on which the clip is centred. In PPO (arXiv:1707.06347) both are one, since answers are new. Here they are told apart as
in arXiv:2110.00641 by default: the clip is around the model as it is when the group is replayed, and the token's advantage is
multiplied by present / sampling probability, bounded (`method.replay_max_weight`). With `method.replay_recompute_logps: false` the
ratio itself is taken to the model that gave the answer, as RePO does (arXiv:2506.09340): that corrects as well, but the clip then
bounds what all replays of a group do together, and little is learned from one. Axolotl computes the log-probabilities anew and has no
weight: every ratio is 1 however old the answer is, and nothing corrects; measured, that leaves the reference several times as far.

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
from engine.trainers.rollouts import Pass, text_of
from engine.trainers.zero_advantage import GroupTrainer

LEFT = ("prompt_ids", "prompt_mask")
"""Tensors of a batch that are padded left, (B, P)."""
OLD, KEPT = "old_per_token_logps", "replayed_logps"
"""(B, T): TRL's log-probabilities that ratios are taken to, and those of replayed answers by the model that gave them."""
REFERENCE = "ref_per_token_logps"
SAMPLED, WEIGHT = "sampling_per_token_logps", "importance_sampling_ratio"
"""TRL's where others sample than the present weights: their log-probabilities (B, T), and the weight of present to theirs, (B, T)
or (B, 1). Replayed answers are corrected for their sampler by themselves, so this is 1 for them."""


class ReplayTrainer(GroupTrainer):
    """What GRPO and GDPO have of a replay buffer; without one each step is what it would be without this class."""

    _filling: dict[str, Any] | None = None
    """The batch with replays whose old log-probabilities are those of the pass under way, while its loss is computed."""

    def take(self, config: RunConfig, rewards: Rewards, note: str) -> None:
        super().take(config, rewards, note)
        method = method_of(config, Groups)
        if not method.replay_buffer_size:
            return
        longest = config.data.max_length, method.max_completion_length
        fits = FitsRun(method.num_generations, *longest, bool(method.beta), list(method.reward_funcs))
        self.replay = ReplayBuffer(method.replay_buffer_size, method.replay_max_age, self.args.seed, fits)
        self._room = replay_bytes(config)
        self._most = method.replay_max_weight if method.replay_recompute_logps else None

    def receipt_note(self) -> str:
        """What the receipt adds about the loss."""
        note = super().receipt_note()
        if (buffer := self.replay) is None:
            return note
        how = "with ratios to the model that gave them"
        if self._most is not None:
            how = f"with old log-probabilities by the present model, and weights to the one that gave them of at most {self._most:g}"
        return (
            f"{note}; groups that teach nothing give their place to earlier ones, drawn by score from the best {buffer.size:,} "
            f"of the last {buffer.max_age:,} steps, {how} "
            f"(ids and log-probabilities: at most {figures.size(self._room)} of main memory a process, and of each checkpoint)"
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
        return self._pass(output, places)

    def _pass(self, output: dict[str, Any], places: list[int]) -> torch.Tensor:
        """(B, T): what the model as it is gives the tokens of these answers; as many passes on each process."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        if self.computes_all:  # as many rows as ever: compiled layers would be compiled anew
            places = list(range(len(ids)))
        size, width = self.args.per_device_train_batch_size, output["completion_ids"].shape[1]
        self._waiting = Pass(self.model, ids, mask, width, size)
        return self._sampled_logps(places, output["length"].tolist())

    def _put_in(self, output: dict[str, Any], drawn: dict[int, StoredGroup], tokens: float) -> None:
        """Makes the answers of the groups `drawn`, by number, those of earlier ones; they had `tokens` that count, on all
        processes."""
        size, first = self.num_generations, self._first(output)
        numbers = [divmod(first + place, size) for place in range(len(output["advantages"]))]
        places = [place for place, (number, _) in enumerate(numbers) if number in drawn]
        own = [(drawn[number], which) for number, which in (numbers[place] for place in places)]
        self._widen(output, [group for group, _ in own])
        output[KEPT] = torch.zeros_like(output["completion_mask"], dtype=torch.float32)
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
        if OLD in output and self._most is not None:
            rows = torch.tensor(places, device=output[OLD].device, dtype=torch.long)
            output[OLD][rows] = self._pass(output, places)[rows].to(output[OLD])

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
            KEPT: old,
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
        rows |= {name: old for name in (OLD, SAMPLED) if name in output}
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
        if self.mode != "train" or KEPT not in inputs or not inputs["replayed"].any():
            return super()._compute_loss(model, inputs)
        given = dict(inputs)
        if OLD in given:
            self._weigh(given)
        else:  # which are the log-probabilities of the pass that the loss makes
            given[OLD] = torch.zeros_like(given[KEPT])
            self._filling = given
        try:
            return super()._compute_loss(model, given)
        finally:
            self._filling = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if (given := self._filling) is not None:
            self._filling = None
            now, replayed = found[0].detach().to(given[KEPT]), given["replayed"].to(given[KEPT].device)[:, None]
            given[OLD].copy_(now if self._most is not None else torch.where(replayed, given[KEPT], now))
            self._weigh(given)
        return found

    def _weigh(self, given: dict[str, Any]) -> None:
        """Multiplies advantages of replayed tokens, or answers where ratios are of those, by how much likelier they are by the old
        log-probabilities than they were to the model that gave them; all losses here are linear in advantages of one sign."""
        if self._most is None:
            return
        mask = given["completion_mask"].bool() & given["replayed"].to(given[KEPT].device)[:, None]
        apart = (given[OLD] - given[KEPT]).masked_fill(~mask, 0.0)
        if self.importance_sampling_level == "sequence":
            apart = apart.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        given["advantages"] = given["advantages"][:, None] * apart.exp().clamp(max=self._most).to(given["advantages"])
        if self.off_policy_mask_threshold is not None:  # how far the model is from the one that gave an answer
            replayed = given["replayed"].to(given[KEPT].device)[:, None]
            given[SAMPLED] = torch.where(replayed, given[KEPT], given.get(SAMPLED, given[OLD]))
