"""Proximal policy optimization (arXiv:1707.06347) with a value head, on the sampling and the rewards of GRPO.

TRL has no PPO any more. Sampling, scoring, buffers and the reference are TRL's GRPOTrainer, with groups of one by
default; ours are what makes it PPO: a value head on the model's last hidden states, the divergence from the reference
taken off the reward token by token, advantages by GAE (arXiv:1506.02438), and the clipped losses of policy and value. The
head is trained with the model at a rate of its own and kept beside it: a checkpoint's weights load without it.

Shapes: B answers, T tokens of the longest, P of the longest prompt, H hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig

from engine.config import rollouts
from engine.config.tree import RunConfig, method_of
from engine.features.built import base_model
from engine.trainers.job import Job
from engine.trainers.rollouts import Pass, RolloutTrainer, built, rollout_arguments

HEAD = "value_head"


class ValueHead(torch.nn.Linear):
    """One number for each hidden state; begins at 0 everywhere."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)


class Ppo(RolloutTrainer):
    """TRL's trainer with advantages and losses of PPO; `value` gives it its head."""

    settings: rollouts.Ppo

    def value(self, settings: rollouts.Ppo) -> None:
        """Adds the value head to the model; call it in `build`."""
        self.settings = settings
        base = base_model(self.model)
        width = base.config.get_text_config().hidden_size
        self.head = ValueHead(width).to(base.device)
        setattr(self.model, HEAD, self.head)
        self.register_state(HEAD, self.head)
        base.base_model.register_forward_hook(self._keep_hidden)

    def receipt_note(self) -> str:
        """What the receipt adds about the loss."""
        count = sum(each.numel() for each in self.head.parameters())
        return f"{super().receipt_note()}; PPO's own losses, value head of {count} parameters"

    def _keep_hidden(self, module: Any, args: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state

    # -- what the head asks of a trainer -------------------------------------------------------------------------------
    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """The model's groups as everywhere, and one for the head with its own rate and no decay."""
        del self.model._modules[HEAD]
        try:
            optimizer = super().create_optimizer(model)
        finally:
            setattr(self.model, HEAD, self.head)
        rate = self.settings.value_learning_rate
        optimizer.add_param_group({"params": list(self.head.parameters()), "lr": rate, "weight_decay": 0.0})
        return optimizer

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """The model without the head, which is saved as a part of the trainer."""
        del self.model._modules[HEAD]
        try:
            super().save_model(*args, **kwargs)
        finally:
            setattr(self.model, HEAD, self.head)

    # -- rollouts ------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _with_advantages(self, output: dict[str, Any]) -> dict[str, Any]:
        """Joins `old_per_token_logps`, `old_values`, `returns` and `advantages` of shape (B, T).

        An answer to which no reward applies is not a bad one: its advantages are 0 and its returns the values themselves,
        so that neither the policy nor the value head learns from it.
        """
        settings, mask = self.settings, output["completion_mask"]
        args, mode = self.args, self.mode
        step = args.per_device_train_batch_size if mode == "train" else args.per_device_eval_batch_size
        parts = [
            self._read(self.model, {name: output[name][start : start + step] for name in _INPUTS})
            for start in range(0, len(mask), step)
        ]
        logps, _, values = (torch.cat(each) for each in zip(*parts, strict=True))
        count, start = len(mask), self.accelerator.process_index * len(mask)
        weights = self.reward_weights.to(self._scores.device)
        scores = (self._scores * weights).nansum(1)[start : start + count]
        applies = self._scores.isfinite().any(1)[start : start + count, None]
        away = torch.zeros_like(logps)
        if "ref_per_token_logps" in output:
            away = (logps - output["ref_per_token_logps"]) * mask
        rewards = token_rewards(scores, self.beta * away, mask)
        advantages, returns = gae(rewards, values, mask, settings.gamma, settings.lam)
        output["advantages"] = self._whitened(advantages, mask * applies)
        returns = torch.where(applies, returns, values * mask)
        output |= {"old_per_token_logps": logps, "old_values": values * mask, "returns": returns}
        metrics = self._metrics[mode]
        found = torch.stack(
            [
                scores.sum(),
                applies.sum().to(scores.dtype),
                away.sum(1).mean(),
                (-logps * mask).sum(1).mean(),
            ]
        )
        total, judged, kl, entropy = self.accelerator.reduce(found, "mean").tolist()
        score = total / max(judged, 1e-12)
        metrics["objective/scores"].append(score)
        metrics["objective/kl"].append(kl)
        metrics["objective/non_score_reward"].append(-self.beta * kl)
        metrics["objective/rlhf_reward"].append(score - self.beta * kl)
        metrics["objective/entropy"].append(entropy)  # of whole answers; a token's is policy/entropy_avg
        return output

    def _whitened(self, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Mean 0 and spread 1 over all tokens of all ranks."""
        sums = torch.stack([(advantages * mask).sum(), (advantages.square() * mask).sum(), mask.sum()])
        total, squares, count = self.accelerator.reduce(sums.double(), "sum")
        count = count.clamp(min=1)
        mean = total / count
        spread = (squares / count - mean.square()).clamp(min=0).sqrt()
        return ((advantages - mean) / (spread + 1e-8)).to(advantages.dtype) * mask

    # -- loss ----------------------------------------------------------------------------------------------------------
    def _read(self, model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities, entropies and values of the answers' tokens, each (B, T), in one pass of the model."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        width = batch["completion_ids"].shape[1]
        logps, entropy, _ = self.read_logps(Pass(model, ids, attention, width, len(ids)), compute_entropy=True)
        # the state before a token is that of the token before it
        hidden = self._hidden[:, -width - 1 : -1]
        return logps, entropy, self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        settings, mask = self.settings, inputs["completion_mask"]
        mode = self.mode
        logps, entropy, values = self._read(model, inputs)
        bounds = (1 - self.epsilon_low, 1 + self.epsilon_high)
        policy, clipped = policy_loss(logps, inputs["old_per_token_logps"], inputs["advantages"], bounds)
        value, value_clipped = value_loss(values, inputs["old_values"], inputs["returns"], settings.cliprange_value)
        # every token of an optimizer step weighs the same, whatever batch it came in
        tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if mode == "train":
            tokens = tokens * self.current_gradient_accumulation_steps / self.sampled_together
        loss = ((policy + settings.vf_coef * value) * mask).sum() / tokens
        changed = (logps - inputs["old_per_token_logps"]).detach()
        told = {
            "loss/policy_avg": policy, "loss/value_avg": value, "policy/clipfrac_avg": clipped,
            "val/clipfrac_avg": value_clipped, "policy/approxkl_avg": 0.5 * changed.square(),
            "policy/entropy_avg": entropy, "val/ratio": changed.exp(),
        }  # fmt: skip
        sums = torch.stack([(each.detach() * mask).sum() for each in told.values()] + [mask.sum()])
        *means, count = self.accelerator.reduce(sums, "sum").tolist()
        for name, total in zip(told, means, strict=True):
            self._metrics[mode][name].append(total / max(count, 1))
        return loss


_INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def token_rewards(scores: torch.Tensor, penalty: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rewards of shape (B, T): minus the penalty at each token, and the score at the answer's last."""
    last = mask.sum(1, keepdim=True).long() - 1
    at_end = torch.zeros_like(penalty).scatter(1, last.clamp(min=0), scores.to(penalty.dtype).unsqueeze(1))
    return (at_end - penalty) * mask


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of shape (B, T), 0 past an answer's end, where nothing is expected any more.

    delta_t = r_t + gamma * V_{t+1} - V_t,  A_t = delta_t + gamma * lam * A_{t+1},  returns = A + V.
    Source: arXiv:1506.02438, equations 11 and 16.
    """
    values = values * mask
    found = torch.zeros_like(values)
    ahead = next_value = torch.zeros_like(values[:, 0])
    for place in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, place] + gamma * next_value - values[:, place]
        ahead = (delta + gamma * lam * ahead) * mask[:, place]
        found[:, place], next_value = ahead, values[:, place]
    return found, found + values


def policy_loss(
    logps: torch.Tensor, old_logps: torch.Tensor, advantages: torch.Tensor, bounds: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(ratio * A, clip(ratio) * A) for each token, and where the clip decides. Source: arXiv:1707.06347, equation 7."""
    ratio = (logps - old_logps).exp()
    free, held = -advantages * ratio, -advantages * ratio.clamp(*bounds)
    return torch.maximum(free, held), (held > free).to(logps.dtype)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error for each token, not less than that of the value held within `cliprange` of the old one."""
    held = old_values + (values - old_values).clamp(-cliprange, cliprange)
    free_error, held_error = (values - returns).square(), (held - returns).square()
    return 0.5 * torch.maximum(free_error, held_error), (held_error > free_error).to(values.dtype)


def arguments(config: RunConfig, run_folder: str | Path) -> GRPOConfig:
    """Our sections as TRL's config. A prompt may be answered once, which TRL refuses for GRPO alone."""
    method = method_of(config, rollouts.Ppo)
    optim, size = config.optim, method.num_generations
    together = (method.steps_per_generation or optim.gradient_accumulation_steps) * optim.per_device_train_batch_size
    args = rollout_arguments(
        config, run_folder, num_generations=size if size > 1 else max(2, together), num_generations_eval=1
    )
    args.num_generations = size
    # The head is read off the hidden states beside the model's own pass, so ranks that look for what a pass left unused
    # would count its gradients twice.
    args.ddp_find_unused_parameters = False
    return args


def build(job: Job) -> Ppo:
    """The trainer, ready to `attach`. Raises WorkbenchError for a reward that fails on the first rows."""
    trainer = built(Ppo, arguments(job.config, job.run_folder), job)
    trainer.value(method_of(job.config, rollouts.Ppo))
    return trainer
