"""Rules about methods with rewards: something scores the answers, groups are whole, no setting without an effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, Severity, must, notice
from engine.config.method import METHODS
from engine.config.reward_specs import BadReward, files_of, reward_spec
from engine.config.rule import Refused, leave_out, one_of, other_than, refused, rule, take
from engine.config.tree import RunConfig, fields
from engine.facts import counts

_GROUPED = (fields.method.kind, fields.method.num_generations, fields.optim.per_device_train_batch_size)
_UNCLIPPED = {"sapo": "a soft gate", "cispo": "an upper bound alone"}
_KIND, _LOSS, _SIZE = fields.method.kind, fields.method.loss_type, fields.method.num_generations

refused(
    __name__,
    Refused(
        "groups-need-more-than-one-answer",
        _SIZE,
        one_of(1),
        "2 or more for {config.method.kind}",
        "An answer is judged by the others to its prompt, so one alone teaches nothing.",
        take(_SIZE, 8, "set it to 8"),
        beside={_KIND: other_than("ppo")},
    ),
    Refused(
        "ratios-of-whole-answers-need-equal-answers",
        _LOSS,
        one_of("bnpo", "dr_grpo", "dapo", "cispo"),
        "grpo or sapo while the ratio is that of whole answers",
        "The others count a long answer more often, once for each of its tokens.",
        take(_LOSS, "grpo"),
        beside={fields.method.importance_sampling_level: one_of("sequence")},
        severity="warning",
    ),
    Refused(
        "each-answer-is-held-to-the-reference",
        fields.method.skip_zero_advantage,
        one_of(True),
        "auto or false while method.beta is above 0",
        "The divergence from the reference has a gradient in each answer, also in those that teach nothing.",
        leave_out(fields.method.skip_zero_advantage, "remove it"),
        beside={fields.method.beta: bool},
    ),
    *(
        Refused(
            name,
            spec,
            other_than(spec.default),
            f"left out while {switch.path} is {off:g}",
            why,
            leave_out(spec, "remove it"),
            beside={switch: one_of(off)},
        )
        for switch, off, why, idle in (
            (
                fields.method.reroll_start_fraction,
                1.0,
                "No prompt comes back then: lower that, or remove this.",
                {
                    "prompts-come-back-where-that-is-asked-for": fields.method.reroll_max_groups,
                    "failed-prompts-are-tried-where-they-come-back": fields.method.reroll_max_tries,
                },
            ),
            (
                fields.method.replay_buffer_size,
                0,
                "No group is replayed then: raise that, or remove this.",
                {
                    "an-oldest-replay-where-groups-are-kept": fields.method.replay_max_age,
                    "old-log-probabilities-of-replayed-groups": fields.method.replay_recompute_logps,
                    "a-weight-where-groups-are-kept": fields.method.replay_max_weight,
                },
            ),
        )
        for name, spec in idle.items()
    ),
    Refused(
        "a-weight-where-the-ratio-is-none",
        fields.method.replay_max_weight,
        other_than(fields.method.replay_max_weight.default),
        "left out while method.replay_recompute_logps is false",
        "The ratio is taken to the model that gave an answer then, and the clip bounds it.",
        leave_out(fields.method.replay_max_weight, "remove it"),
        beside={fields.method.replay_recompute_logps: one_of(False)},
    ),
    Refused(
        "sampled-and-trained-with-the-same-weights",
        fields.adapter.lora_dropout,
        bool,
        "0 for {config.method.kind}",
        "Answers are judged by how likely the model finds them, and dropout makes that a matter of chance.",
        leave_out(fields.adapter.lora_dropout, "remove it"),
        beside={_KIND: one_of(*(kind for kind, method in METHODS.items() if method.rows == "prompts"))},
        severity="warning",
    ),
)


def _method(config: RunConfig) -> Any | None:
    """The method's section where it learns from rewards."""
    return config.method if config.method.rows == "prompts" else None


def _replays(config: RunConfig) -> bool:
    """Whether groups are trained on again."""
    return bool(getattr(config.method, "replay_buffer_size", 0))


@rule(reads=(fields.method.kind, fields.method.reward_funcs))
def rewards_are_named(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    method, path = _method(config), fields.method.reward_funcs.path
    if method is not None and not method.reward_funcs:
        todo = "Name what scores an answer; exact_match compares it with the row's own."
        yield must(path, "at least one reward", None, todo, fix=Fix("take exact_match", {path: ["exact_match"]}))


@rule(reads=(fields.method.kind, fields.method.reward_funcs))
def rewards_are_known(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    method = _method(config)
    for index, text in enumerate(method.reward_funcs if method is not None else ()):
        try:
            reward_spec(text)
        except BadReward as problem:
            yield must(f"{fields.method.reward_funcs.path}.{index}", problem.rule, text, problem.todo)


@rule(reads=(fields.method.kind, fields.method.reward_funcs))
def reward_files_exist(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    method = _method(config)
    for index, text in enumerate(method.reward_funcs if method is not None else ()):
        for path in files_of([text]):
            if facts.files is not None and facts.files.get(path) is False:
                place = f"{fields.method.reward_funcs.path}.{index}"
                what = "a file that is there" if reward_spec(text).kind != "model" else "a folder with a model in it"
                yield must(place, what, path, "Check the path; it is read from the config's folder.")
        if flaw := (facts.reward_flaws or {}).get(text):
            yield notice(f"{fields.method.reward_funcs.path}.{index}", flaw, severity="error")


@rule(reads=(*_GROUPED, fields.method.steps_per_generation, fields.optim.gradient_accumulation_steps))
def batches_hold_whole_groups(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """The answers sampled together are so many groups; TRL refuses parts of one."""
    size, path = getattr(config.method, "num_generations", 1), fields.optim.per_device_train_batch_size.path
    batch = config.optim.per_device_train_batch_size
    times = _together(config)
    if size < 2 or batch * times % size == 0:
        return
    fitting = next(larger for larger in range(batch + 1, batch + size + 1) if larger * times % size == 0)
    batches = "batch" if times == 1 else "batches"
    todo = f"With {times} {batches} sampled together there are {batch * times} answers, which is no whole number of groups."
    rule_text = f"such that the answers sampled together make whole groups of {size} (method.num_generations)"
    yield must(path, rule_text, batch, todo, fix=Fix(f"set it to {fitting}", {path: fitting}))


@rule(
    reads=(
        *_GROUPED, fields.method.reroll_start_fraction, fields.method.reroll_max_groups, fields.method.steps_per_generation,
        fields.optim.gradient_accumulation_steps,
    )
)  # fmt: skip
def other_prompts_are_asked_too(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Prompts that nothing solves come back: alone in a sampling they would be all that the run asks."""
    most, spec = fields.method.reroll_max_groups, fields.method.steps_per_generation
    if not most.applies(config) or fields.method.reroll_start_fraction.value(config) == 1:
        return
    groups = config.optim.per_device_train_batch_size * _together(config) // _SIZE.value(config)
    if not 0 < groups <= most.value(config):
        return
    times = spec if spec.value(config) else fields.optim.gradient_accumulation_steps
    fix = take(most, groups - 1) if groups > 1 else take(times, 2 * times.value(config), "sample more together")
    asked = f"{groups} prompts are" if groups > 1 else "1 prompt is"
    todo = f"{asked} sampled at a time: while failed ones wait, no other would be asked."
    yield must(
        most.path,
        "less than the prompts that are sampled together",
        most.value(config),
        todo,
        severity="warning",
        fix=fix,
    )


@rule(reads=(fields.method.kind, fields.method.reward_funcs))
def several_rewards_for_gdpo(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, kind = fields.method.reward_funcs.path, fields.method.kind.path
    if config.method.kind == "gdpo" and len(config.method.reward_funcs) == 1:
        todo = "It keeps several rewards apart; with one alone take grpo."
        fix = Fix("take grpo", {kind: "grpo"})
        got = config.method.reward_funcs
        yield must(path, "two or more rewards for gdpo", got, todo, severity="warning", fix=fix)


@rule(reads=(*_GROUPED, fields.method.steps_per_generation, fields.optim.gradient_accumulation_steps))
def advantages_need_more_than_one_answer(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    batch, path = config.optim.per_device_train_batch_size, fields.optim.per_device_train_batch_size.path
    if config.method.kind == "ppo" and batch * _together(config) == 1:
        todo = "Advantages are compared over all answers that are sampled together."
        yield must(path, "2 or more for ppo", batch, todo, fix=Fix("set it to 8", {path: 8}))


@rule(reads=(*_GROUPED, fields.data.eval, fields.data.val_set_size, fields.optim.per_device_eval_batch_size))
def held_out_batches_hold_whole_groups(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    size, path = getattr(config.method, "num_generations", 1), fields.optim.per_device_eval_batch_size.path
    batch = config.optim.per_device_eval_batch_size or config.optim.per_device_train_batch_size
    if (
        size < 2
        or config.method.kind == "ppo"
        or not config.data.evaluates
        or batch * counts.device_count(config) % size == 0
    ):
        return
    todo = "Held-out prompts are answered in groups too."
    fix = Fix(f"set it to {size}", {path: size})
    yield must(path, f"a multiple of {size} (method.num_generations)", batch, todo, fix=fix)


@rule(reads=(*_GROUPED, fields.data.train, fields.optim.gradient_accumulation_steps))
def there_are_prompts_for_one_sampling(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """An epoch drops prompts that do not fill a sampling, so with fewer there is no step at all."""
    size, rows = getattr(config.method, "num_generations", 1), counts.train_rows(config, facts)
    if _method(config) is None or rows is None or not rows:
        return
    batch = config.optim.per_device_train_batch_size
    prompts = batch * _together(config) // size
    if rows < prompts:
        todo = "Take more prompts, or sample fewer answers together."
        yield must(fields.data.train.path, f"at least the {prompts} prompts that are sampled together", rows, todo)


@rule(reads=(fields.method.kind, fields.method.loss_type, fields.method.epsilon, fields.method.epsilon_high))
def clipping_needs_a_loss_that_clips(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    method = _method(config)
    loss = getattr(method, "loss_type", None)
    if method is None or loss not in _UNCLIPPED:
        return
    given: list[tuple[Any, bool]] = [(fields.method.epsilon, method.epsilon != fields.method.epsilon.default)]
    given.append((fields.method.epsilon_high, loss == "sapo" and method.epsilon_high is not None))
    for spec, wrong in given:
        if wrong:
            rule_text = f"left out with the loss {loss}, which has {_UNCLIPPED[loss]} instead"
            yield must(spec.path, rule_text, spec.value(config), "Remove it.", fix=Fix("remove it", unset=(spec.path,)))
    if loss == "cispo" and (method.epsilon_high is None or method.epsilon_high < 1):
        path = fields.method.epsilon_high.path
        todo = "It bounds the weight of a token itself there, and a weight below 1 would shrink every step."
        yield must(
            path, "1 or more with the loss cispo", method.epsilon_high, todo, fix=Fix("set it to 5", {path: 5.0})
        )


@rule(
    reads=(
        fields.method.kind,
        fields.method.loss_type,
        fields.method.epsilon,
        fields.method.epsilon_high,
        fields.method.importance_sampling_level,
        fields.method.cliprange_value,
        fields.method.num_iterations,
        fields.method.steps_per_generation,
        fields.method.replay_buffer_size,
        fields.method.replay_recompute_logps,
        fields.method.async_prefetch,
        fields.optim.gradient_accumulation_steps,
    )
)
def bounds_need_answers_that_grow_old(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Answers that are all trained on within one optimizer step are the present model's own: every ratio is 1."""
    method = _method(config)
    if method is None or not counts.always_new(config):
        return
    for spec in (
        fields.method.epsilon,
        fields.method.epsilon_high,
        fields.method.importance_sampling_level,
        fields.method.cliprange_value,
    ):
        value = getattr(method, spec.name, None)
        # Losses without this clip have a rule of their own, and cispo must be given its bound.
        elsewhere = spec.name.startswith("epsilon") and getattr(method, "loss_type", None) in _UNCLIPPED
        # A replayed answer is weighed as a whole or token by token.
        weighs = spec is fields.method.importance_sampling_level and _replays(config)
        if value is None or value == spec.of(config).default or elsewhere or weighs:
            continue
        rule_text = "left out while every answer is trained on by the model that gave it"
        todo = "Nothing has moved by then that it could bound: remove it, or raise method.num_iterations."
        if _replays(config) or fields.method.async_prefetch.value(config) != "none":  # others gave some of them
            rule_text = "left out while every ratio is to the present model"
        if _replays(config):
            todo = f"{todo[:-1]}; replays have other ratios with method.replay_recompute_logps: false."
        yield must(spec.path, rule_text, value, todo, fix=Fix("remove it", unset=(spec.path,)))


@rule(reads=(fields.method.kind, fields.model.name, fields.data.max_length, fields.method.max_completion_length))
def answers_stay_within_the_model(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """A prompt with its longest answer has a place in the model; `max_length_is_within_the_model` sees to prompts alone."""
    method, model = _method(config), counts.known_model(config, facts)
    if method is None or model is None or not model.max_length:
        return
    limit, answer = model.max_length, method.max_completion_length
    longest = facts.data.longest if facts.data is not None else None
    prompt = min(longest or config.data.max_length, config.data.max_length, limit)
    if prompt + answer <= limit:
        return
    # Until they are counted prompts may be shorter than they are allowed to be.
    severity: Severity = "error" if longest or answer >= limit else "hint"
    takes = (
        f"a prompt takes up to {prompt:,} of them"
        if longest
        else f"data.max_length gives {prompt:,} of them to a prompt"
    )
    todo = f"{model.name} knows {limit:,} positions, and {takes}."
    spec, most, got = fields.method.max_completion_length, limit - prompt, answer
    if not most:
        spec, most, got = fields.data.max_length, max(limit - answer, limit // 2), config.data.max_length
        todo = f"{model.name} knows {limit:,} positions, and an answer comes behind the prompt."
    fix = Fix(f"set it to {most}", {spec.path: most})
    yield must(spec.path, f"at most {most}", got, todo, severity=severity, fix=fix)


@rule(reads=(fields.method.kind, fields.method.reference, fields.method.beta))
def a_reference_needs_weight(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    method, path = _method(config), fields.method.reference.path
    if method is not None and method.beta == 0 and path in facts.given and method.reference != "auto":
        todo = "Remove it, or set beta above 0 to hold the model to the reference."
        fix = Fix("remove it", unset=(path,))
        yield must(path, "left out while method.beta is 0", method.reference, todo, severity="warning", fix=fix)


@rule(reads=(fields.method.kind, fields.method.skip_zero_advantage, fields.model.name))
def experts_are_balanced_over_all_tokens(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, spec = counts.known_model(config, facts), fields.method.skip_zero_advantage
    if model is not None and model.experts and spec.applies(config) and spec.value(config) is True:
        todo = f"The routers of {model.name} are balanced, and their load is counted, over the tokens of all answers."
        fix = Fix("remove it", unset=(spec.path,))
        yield must(spec.path, "auto or false for a mixture of experts", True, todo, fix=fix)


def _together(config: RunConfig) -> int:
    """Batches whose answers are sampled at once, over all devices."""
    times: int = getattr(config.method, "steps_per_generation", None) or config.optim.gradient_accumulation_steps
    return times * counts.device_count(config)
