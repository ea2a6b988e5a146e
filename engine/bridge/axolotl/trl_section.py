"""The section `trl` of an Axolotl config: rewards, and how answers are sampled and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.bridge.keys import (
    OFF,
    Answer,
    File,
    Key,
    Part,
    changed,
    choice,
    mapped,
    needless,
    nothing,
    same,
    unless_off,
    unsupported,
)
from engine.bridge.sources import reward_function
from engine.config.renames import is_off


def trl(value: Any, file: File) -> Answer | list[Part]:
    if not isinstance(value, Mapping):
        return needless(OFF)
    parts: list[Part] = []
    for key, item in value.items():
        known = _IN_TRL.get(str(key))
        if item is None:
            answer: Answer | list[Part] = needless(OFF)
        elif known is not None:
            answer = known.means(item, file)
        elif str(key).startswith("vllm_"):
            answer = needless("It counts with vLLM alone.") if not value.get("use_vllm") else _VLLM
        else:
            answer = needless(OFF) if is_off(item) else unsupported("Answers are sampled and compared without it here.")
        parts += (
            [(f"{key}.{inner}", each, part) for inner, each, part in answer]
            if isinstance(answer, list)
            else [(str(key), item, answer)]
        )
    return parts


_VLLM = unsupported("Answers are sampled by the model that is trained; vLLM and SGLang are not here yet.")
_REWARD = "A reward function of a module is written as `file.py:function` in method.reward_funcs."


def _rewards(value: Any, file: File) -> Answer:
    names = value if isinstance(value, list) else [value]
    rewards = [reward_function(str(name), file) for name in names]
    if not all(rewards):
        return unsupported(_REWARD)
    trl = file.get("trl")
    weights = trl.get("reward_weights") if isinstance(trl, Mapping) else None
    if isinstance(weights, list) and len(weights) == len(rewards):
        rewards = [f"{weight} * {name}" for weight, name in zip(weights, rewards, strict=True)]
    return changed({"method.reward_funcs": rewards}, "The function is taken from the file of that module.")


def _scaled(value: Any, file: File) -> Answer:
    return mapped({"method.scale_rewards": "group" if value is True else "none" if value is False else value})


def _groups_again(value: Any, file: File) -> Answer:
    trl = file.get("trl")
    begins = trl.get("reroll_start_fraction") if isinstance(trl, Mapping) else None
    if begins is None or begins == 1:
        return needless("It counts with reroll_start_fraction.")
    return mapped({"method.reroll_max_groups": value})


def _replayed(value: Any, file: File) -> Answer:
    """Where Axolotl computes old log-probabilities anew, as it does unless it is told not to, it weighs nothing by its age."""
    if not isinstance(value, int) or value < 1:
        return needless(OFF) if is_off(value) else unsupported("It is a number of groups.")
    trl, settings = file.get("trl"), {"method.replay_buffer_size": value}
    if _is_ahead(file):
        return unsupported(
            "Groups are kept as the present model samples them, and those made ahead by async_prefetch are older."
        )
    if isinstance(trl, Mapping) and trl.get("replay_recompute_logps") is False:
        return changed({**settings, "method.replay_recompute_logps": False}, _OLDEST)
    return changed(
        settings, f"A replayed token is weighed by how much likelier it is now; Axolotl weighs nothing. {_OLDEST}"
    )


_OLDEST = "Groups older than method.replay_max_age are dropped, which Axolotl does not."


def _is_ahead(file: File) -> bool:
    """Whether the file asks for answers that are made ahead."""
    trl = file.get("trl")
    return isinstance(trl, Mapping) and trl.get("async_prefetch") is True


def _ahead(path: str) -> Key:
    """A setting of what is made ahead."""

    def means(value: Any, file: File) -> Answer:
        return mapped({path: value}) if _is_ahead(file) else needless("It counts with async_prefetch.")

    return Key(means)


def _prefetched(value: Any, file: File) -> Answer:
    """Axolotl has a class of its own for it, by whose default old answers are weighed otherwise than by TRL's."""
    if value is not True:
        return needless(OFF) if is_off(value) else unsupported("It is true or false.")
    settings, words = (
        {"method.async_prefetch": "answers"},
        "A process of the run's own samples beside the training, without vLLM.",
    )
    if file.get("trl", {}).get("vllm_importance_sampling_mode") is None:
        settings["method.importance_sampling_mode"] = "token_truncate"
        words += " Old answers are weighed by token_truncate there."
    return changed(settings, words)


def _corrected(value: Any, file: File) -> Answer:
    if not _is_ahead(file):
        return needless("It counts with async_prefetch.")
    return (
        unsupported("Old answers are always weighed.") if is_off(value) else needless("Old answers are always weighed.")
    )


_IN_TRL: dict[str, Key] = {
    "beta": same("method.beta"),
    "max_completion_length": same("method.max_completion_length"),
    "use_vllm": unless_off("Answers are sampled by the model that is trained; vLLM and SGLang are not here yet."),
    "reward_funcs": Key(_rewards),
    "reward_weights": nothing("The weights stand before the rewards in method.reward_funcs."),
    "num_generations": same("method.num_generations"),
    "log_completions": nothing("Groups with their answers are kept in the run folder: method.rollout_groups."),
    "num_completions_to_print": nothing("Groups with their answers are kept in the run folder: method.rollout_groups."),
    "sync_ref_model": unless_off("The reference stays where training began."),
    "ref_model_mixup_alpha": nothing("It counts where the reference follows the model."),
    "ref_model_sync_steps": nothing("It counts where the reference follows the model."),
    "scale_rewards": Key(_scaled),
    "temperature": same("method.temperature"),
    "top_p": same("method.top_p"),
    "top_k": same("method.top_k"),
    "repetition_penalty": same("method.repetition_penalty"),
    "num_iterations": same("method.num_iterations"),
    "epsilon": same("method.epsilon"),
    "epsilon_high": same("method.epsilon_high"),
    "loss_type": same("method.loss_type"),
    "mask_truncated_completions": same("method.mask_truncated_completions"),
    "reroll_start_fraction": same("method.reroll_start_fraction"),
    "reroll_max_groups": Key(_groups_again),
    "replay_buffer_size": Key(_replayed),
    "replay_recompute_logps": nothing("It counts with replay_buffer_size."),
    "async_prefetch": Key(_prefetched),
    "prefetch_depth": _ahead("method.prefetch_depth"),
    "vllm_sync_interval": _ahead("method.weight_sync_steps"),
    "vllm_importance_sampling_mode": _ahead("method.importance_sampling_mode"),
    "vllm_importance_sampling_cap": _ahead("method.importance_sampling_cap"),
    "vllm_importance_sampling_correction": Key(_corrected),
    "vllm_lora_sync": nothing("The adapter is sent as a file."),
    "use_data_producer": nothing("It is how answers are asked for there."),
    "off_policy_mask_threshold": same("method.off_policy_mask_threshold"),
    "skip_zero_advantage_batches": choice(
        {
            True: needless("Answers that teach nothing are left out by themselves where that changes no gradient."),
            False: mapped({"method.skip_zero_advantage": False}),
        }
    ),
    "importance_sampling_level": same("method.importance_sampling_level"),
}
