"""Answers with an advantage of 0, left out of the passes of GRPO's and GDPO's loss: their gradient is zero.

A group whose answers all get the same reward tells none of them apart, and an answer that was cut off may be masked. TRL
computes them forward and backward all the same. Here the rows that are left go through the model, and what they give is put
in its place among all rows, so that TRL's loss sees as many as ever and divides by the same numbers. The advantages of such a
group are made 0: a mean of equal rewards is not always equal to them, and Adam makes a step of the noise where there is no
more than that.

Where no row is left a stub of two tokens goes through the model with an advantage of 0: its gradients are zeros on every
weight, as those of the whole batch would be, so that momentum and decay act as before, and a process without a row makes the
passes and collectives of the others. Where none that teaches has images a row with some is computed too: the parts that see are
to be passed as well.

Shapes: B answers, P tokens of the longest prompt, T of the longest answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from engine.config.rollouts import Groups
from engine.config.tree import RunConfig, method_of
from engine.rewards.scoring import Rewards
from engine.trainers.async_rollouts import AheadTrainer
from engine.trainers.reroll import Reroll, failed_groups
from engine.trainers.rollouts import Pass


class GroupTrainer(AheadTrainer):
    """GRPO and GDPO: what leaves out the answers that teach nothing."""

    computes_all = ""
    """Why answers with an advantage of 0 go through the model too; empty where they are left out."""
    _scoring = False
    """Whether answers are being scored that will be trained on, so that log-probabilities may wait for advantages."""
    _waiting: Pass | None = None
    """The pass of the model that answers were sampled from, until it is known which of them teach."""
    _rows: list[int] | None = None
    """The rows of the batch whose loss is being computed that go through the model; None: all."""
    _entropies: torch.Tensor | None = None
    taught_nothing = False
    """Whether no row of the last batch went through the model, but the stub."""

    def take(self, config: RunConfig, rewards: Rewards, note: str) -> None:
        super().take(config, rewards, note)
        method = method_of(config, Groups)
        if method.reroll_start_fraction < 1:
            self.reroll = Reroll(method.reroll_start_fraction, method.reroll_max_groups, method.reroll_max_tries)
        if method.beta:
            self.computes_all = "method.beta holds each to the reference"
        elif self.aux_loss_enabled:
            self.computes_all = "the routers' loss is of all tokens"
        elif method.skip_zero_advantage is False:
            self.computes_all = "method.skip_zero_advantage is off"

    def receipt_note(self) -> str:
        """What the receipt adds about the loss."""
        note = "answers with an advantage of 0 are "
        note += f"computed too: {self.computes_all}" if self.computes_all else "left out of the loss's passes"
        if (back := self.reroll) is not None:
            note += f"; prompts on which every answer failed come back behind {back.start:.0%} of the steps"
            note += f", each at most {'once' if back.tries == 1 else f'{back.tries} times'}"
        return f"{super().receipt_note()}; {note}"

    def alike(self, scores: torch.Tensor, size: int) -> torch.Tensor:
        """Of each group of `size`, whether its rewards tell no answer apart. `scores` is (answers, rewards)."""
        return without_difference(self._totals(scores)[:, None], size)

    def _totals(self, scores: torch.Tensor) -> torch.Tensor:
        """The weighed sum of each answer's rewards; NaN where none applies."""
        total = (scores * self.reward_weights.to(scores.device)).nansum(1)
        return total.masked_fill(scores.isnan().all(1), torch.nan)

    # -- which answers teach -------------------------------------------------------------------------------------------
    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        training = self.mode == "train"
        first = self.accelerator.process_index * len(inputs)
        if training:
            inputs = self.prompts_of_turn(inputs)
        self._scoring = training and not self.computes_all
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self._scoring, self._waiting = False, None
        if training and self.reroll is not None:
            size, scores = self.num_generations, self._scores
            failed = failed_groups(self._totals(scores), self.alike(scores, size), size)
            self.reroll.keep(inputs, first, failed, size)
            self._metrics["train"]["reroll/given_up"].append(self.reroll.given_up)
        return output

    def chosen(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The prompts of a sampling, some of which failed before."""
        inputs, reroll, first = list(rows), self.reroll, self.accelerator.process_index * len(rows)
        if reroll is None:
            return inputs
        waited = len(reroll.waiting)
        if reroll.is_due(self.state.global_step, self.state.max_steps):
            total = len(inputs) * self.accelerator.num_processes
            inputs = reroll.instead(inputs, first, total, self.num_generations)
        self._metrics[self.mode]["reroll/groups"].append(waited - len(reroll.waiting))
        self._metrics[self.mode]["reroll/waiting"].append(len(reroll.waiting))
        return inputs

    def _with_advantages(self, output: dict[str, Any]) -> dict[str, Any]:
        """Joins `teaches` [B], on the host: the answers that go through the model in the loss."""
        output = super()._with_advantages(output)
        if not self._scoring:
            return output
        count = len(output["advantages"])
        start = self.accelerator.process_index * count
        alike = self.alike(self._scores, self.num_generations).repeat_interleave(self.num_generations)
        output["advantages"] = output["advantages"].masked_fill(alike[start : start + count], 0.0)
        single = ((output["advantages"] != 0) & output["completion_mask"].any(1)).tolist()
        taught = {(start + place) // self.num_generations for place, teaches in enumerate(single) if teaches}
        # Answers share their prompt where groups are whole.
        whole = [(start + place) // self.num_generations in taught for place in range(count)]
        grouped = self.shares_prompts and self.sampled_together == 1
        output["teaches"] = torch.tensor(whole if grouped else single)
        if self._waiting is not None:
            sampled = whole if self.shares_prompts else single
            output["old_per_token_logps"] = self._sampled_logps([place for place in range(count) if sampled[place]])
        return output

    # -- what goes through the model -----------------------------------------------------------------------------------
    def read_logps(self, given: Pass, **more: Any) -> Any:
        """Of rows that are left out log-probabilities and entropies are 0."""
        if self._scoring and self._taken is None:  # those of old answers are weighed by now, all of them
            self._waiting = given
            return torch.zeros(len(given.ids), given.width, device=given.ids.device), None, None
        if self._rows is None:
            return super().read_logps(given, **more)
        logps, self._entropies = self._through(given, self._rows, self._lengths, self._before)
        return logps, self._entropies, None

    def _through(
        self,
        given: Pass,
        rows: list[int],
        lengths: list[int],
        before: torch.Tensor | None = None,
        *,
        entropy: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies (B, T) of `given`, whose answers have these `lengths`, computed for `rows`. Elsewhere
        log-probabilities are those of `before`, whose ratio to them is 1, and entropies 0."""
        shown = self._shown
        taken = rows if self.images is None else _with_an_image(rows, shown, lengths)
        part = given.of(taken, lengths, int(self.pad_to_multiple_of or 1)) if taken else given.stub()
        self._shown = [shown[row] for row in taken] if self.images is not None else shown
        try:
            found, entropies, _ = super().read_logps(part, compute_entropy=entropy)
        finally:
            self._shown = shown
        place = torch.tensor(taken or [0], device=found.device)
        logps = found.new_zeros(len(given.ids), given.width) if before is None else before.to(found.dtype)
        beyond = logps[place, part.width :]
        spread = torch.zeros_like(logps)
        if entropies is not None and rows:
            asked = torch.tensor([row in rows for row in taken], device=found.device)
            own = entropies.to(spread.dtype) * asked[:, None]
            spread = spread.index_copy(0, place, pad(own, (0, beyond.shape[1])))
        return logps.index_copy(0, place, torch.cat([found, beyond], 1)), spread

    @torch.no_grad()
    def _sampled_logps(self, rows: list[int], lengths: list[int] | None = None) -> torch.Tensor:
        """Log-probabilities (B, T) by the model that answers were sampled from, of these rows; 0 of the others. `lengths` are
        those of all B where they are other answers than were sampled."""
        assert self._waiting is not None
        given, lengths = self._waiting, lengths or [len(answer) for answer in self._answers[0]]
        self._scoring, self._waiting = False, None
        size = given.chunk
        if self.holds_all:
            parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        else:  # the passes of a model that several hold are as many on each
            parts = [[row for row in rows if row // size == part] for part in range(-(-len(given.ids) // size))]
        found = torch.zeros(len(given.ids), given.width, device=given.ids.device)
        for part in parts:
            logps, _ = self._through(given, part, lengths, entropy=False)
            found = found.to(logps.dtype)
            found[part] = logps[part]
        return found

    # -- the loss ------------------------------------------------------------------------------------------------------
    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if self.computes_all or self.mode != "train" or "teaches" not in inputs:
            loss: torch.Tensor = super()._compute_loss(model, inputs)
            return loss
        self._rows = [place for place, teaches in enumerate(inputs["teaches"].tolist()) if teaches]
        self.taught_nothing = not self._rows
        self._lengths, self._before = inputs["length"].tolist(), inputs.get("old_per_token_logps")
        try:
            loss = super()._compute_loss(model, inputs)
            self._tell(inputs, self._rows)
        finally:
            self._rows = self._before = self._entropies = None
        return loss

    def _tell(self, inputs: dict[str, Any], rows: list[int]) -> None:
        """Notes what was left out, and in the place of all answers' entropy that of the computed ones."""
        assert self._entropies is not None
        tokens, mask, metrics = inputs["tokens"].tolist(), inputs["completion_mask"], self._metrics[self.mode]
        spread = (self._entropies.detach() * mask).sum().double()
        left = float(sum(tokens) - sum(tokens[row] for row in rows))
        own = torch.tensor([left, float(sum(tokens))], dtype=torch.float64, device=mask.device)
        own = torch.cat([torch.stack([spread, mask[rows].sum().double()]), own])
        total, computed, skipped, all_tokens = self.accelerator.reduce(own, "sum").tolist()
        del metrics["entropy"]  # in which those that were left out count as 0
        if computed:
            metrics["entropy/computed"].append(total / computed)
        self.skipped_tokens += int(skipped)
        metrics["frac_tokens_skipped"].append(skipped / max(all_tokens, 1.0))
        metrics["num_skipped_tokens"] = [self.skipped_tokens]


def _with_an_image(rows: list[int], shown: list[list[str]], lengths: list[int]) -> list[int]:
    """These rows, and the shortest that has images where none of them has: the parts that see are passed as with all rows."""
    seeing = [row for row, images in enumerate(shown) if images]
    if not seeing or any(shown[row] for row in rows):
        return rows
    return [*rows, min(seeing, key=lengths.__getitem__)]


def without_difference(values: torch.Tensor, size: int) -> torch.Tensor:
    """Of each group of `size` rows, whether no column differs within it. `values` is (answers, columns); NaN, where there is
    none, differs from nothing."""
    groups = values.view(-1, size, values.shape[-1])
    least = groups.masked_fill(groups.isnan(), torch.inf).amin(1)
    most = groups.masked_fill(groups.isnan(), -torch.inf).amax(1)
    return (least >= most).all(1)
