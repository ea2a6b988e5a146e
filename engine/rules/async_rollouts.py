"""Rules about samplings that are asked for ahead: who can answer beside the training, and no setting without an effect."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.facts import Facts
from engine.config.findings import Finding, must
from engine.config.method import learns_from_images
from engine.config.reward_specs import BadReward, reward_spec
from engine.config.rule import Refused, leave_out, one_of, other_than, refused, rule, take
from engine.config.tree import RunConfig, fields
from engine.facts import counts

_AHEAD = fields.method.async_prefetch
_NOTHING_AHEAD = take(_AHEAD, "none", "make nothing ahead")

refused(
    __name__,
    Refused(
        "the-generating-process-is-given-an-adapter",
        _AHEAD,
        one_of("answers"),
        "none or rewards while all weights are trained",
        "The process that samples beside the training is given the adapter as a file; all weights would be too much to send.",
        take(fields.adapter.kind, "lora", "train an adapter"),
        beside={fields.adapter.kind: one_of("none")},
    ),
    Refused(
        "prompts-to-come-are-known-by-number",
        _AHEAD,
        one_of("rewards", "answers"),
        "none while data.streaming is on",
        "Which prompts come next is read off the order of all rows, which a stream has not.",
        take(fields.data.streaming, False, "prepare the rows before training"),
        beside={fields.data.streaming: one_of(True)},
    ),
    Refused(
        "replays-need-answers-of-now",
        fields.method.replay_buffer_size,
        other_than(0),
        "0 while method.async_prefetch is rewards or answers",
        "Groups are kept as the present model samples them, and answers made ahead are older.",
        take(fields.method.replay_buffer_size, 0, "keep no groups"),
        beside={_AHEAD: one_of("rewards", "answers")},
    ),
    *(
        Refused(
            f"{spec.name.replace('_', '-')}-counts-with-samplings-ahead",
            spec,
            other_than(spec.default),
            f"left out while method.async_prefetch is {' or '.join(without)}",
            why,
            leave_out(spec, "remove it"),
            beside={_AHEAD: one_of(*without)},
        )
        for spec, without, why in (
            (fields.method.prefetch_depth, ("none",), "Nothing is made ahead then."),
            (fields.method.importance_sampling_mode, ("none",), "Answers are the present model's own then."),
            (fields.method.importance_sampling_cap, ("none",), "Answers are the present model's own then."),
            (fields.method.weight_sync_steps, ("none", "rewards"), "There is no process to send the adapter to then."),
            (fields.method.generation_timeout, ("none", "rewards"), "There is no process to wait for then."),
            (fields.method.generation_device, ("none", "rewards"), "There is no process to place then."),
        )
    ),
)  # fmt: skip


@rule(reads=(fields.method.kind, _AHEAD, fields.run.devices, fields.distributed.nodes))
def samplings_ahead_need_one_process(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if not _AHEAD.applies(config) or _AHEAD.value(config) == "none" or counts.device_count(config) == 1:
        return
    todo = f"{counts.device_count(config)} processes train, and what is asked for ahead is asked for by one."
    yield must(_AHEAD.path, "none with several devices", _AHEAD.value(config), todo, fix=_NOTHING_AHEAD)


@rule(reads=(fields.method.kind, _AHEAD, fields.method.generation_device))
def the_generating_process_has_a_gpu_that_is_there(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec = fields.method.generation_device
    if facts.machine is None or not spec.applies(config) or (number := spec.value(config)) is None:
        return
    if number >= (count := len(facts.machine.gpus)):
        there = (
            f"there are {count} GPUs, counted from 0"
            if count > 1
            else "there is 1 GPU, number 0"
            if count
            else "there is no GPU"
        )
        todo = f"On this machine {there}. Left out, it shares what the training has."
        yield must(spec.path, "the number of a GPU that is there", number, todo, fix=leave_out(spec, "remove it"))


@rule(reads=(fields.method.kind, _AHEAD, fields.model.name))
def samplings_ahead_are_of_text(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = counts.known_model(config, facts)
    if not _AHEAD.applies(config) or _AHEAD.value(config) == "none" or model is None or model.vision is None:
        return
    if learns_from_images(config.method.kind):
        todo = f"{model.name} sees images, and prompts that are asked for ahead are of text."
        yield must(_AHEAD.path, "none for a model that sees", _AHEAD.value(config), todo, fix=_NOTHING_AHEAD)


@rule(reads=(fields.method.kind, _AHEAD, fields.method.reward_funcs))
def reward_functions_compute_meanwhile(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if not _AHEAD.applies(config) or _AHEAD.value(config) != "rewards":
        return
    texts = fields.method.reward_funcs.value(config)
    try:
        kinds = {reward_spec(text).kind for text in texts}
    except BadReward:
        return
    if kinds == {"model"}:
        todo = "A reward model is asked when the turn of its answers has come: nothing is made meanwhile, and answers are older."
        yield must(
            _AHEAD.path, "none where reward models alone score", "rewards", todo, severity="warning", fix=_NOTHING_AHEAD
        )


@rule(
    reads=(
        fields.method.kind, _AHEAD, fields.method.off_policy_mask_threshold, fields.method.num_iterations,
        fields.method.steps_per_generation, fields.method.replay_buffer_size, fields.optim.gradient_accumulation_steps,
    )
)  # fmt: skip
def only_old_answers_are_far_off(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec = fields.method.off_policy_mask_threshold
    if not spec.applies(config) or spec.value(config) is None or _AHEAD.value(config) != "none":
        return
    if fields.method.replay_buffer_size.value(config):  # a replayed one is of weights that are gone
        return
    if counts.always_new(config):
        todo = "The model has not moved away from any by then: remove it, or raise method.num_iterations."
        rule_text = "left out while every answer is trained on by the model that gave it"
        yield must(spec.path, rule_text, spec.value(config), todo, fix=leave_out(spec, "remove it"))
