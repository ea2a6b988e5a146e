"""Rules about the run: where it goes, how often it writes, what it asks the model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import not_

from engine import figures
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must, notice
from engine.config.rule import Refused, leave_out, one_of, other_than, refused, rule
from engine.config.run import TRACKERS
from engine.config.tree import FieldSpec, RunConfig, fields
from engine.errors import host_of, nearest
from engine.facts.counts import total_steps
from engine.hub import is_repository
from engine.planning.memory_model import checkpoint_bytes

_LENGTH = (
    fields.optim.max_steps,
    fields.optim.num_train_epochs,
    fields.optim.per_device_train_batch_size,
    fields.optim.gradient_accumulation_steps,
    fields.data.train,
)


def _holds(tracker: str, given: list[str]) -> bool:
    return tracker in given


refused(
    __name__,
    Refused(
        "mlx-is-not-a-backend-here",
        fields.run.backend,
        one_of("mlx"),
        "torch in this version",
        "MLX trains on Apple chips with a library of its own; here torch does, also on a Mac's CPU.",
        leave_out(fields.run.backend),
    ),
    Refused(
        "unsloth-is-not-a-backend-here",
        fields.run.backend,
        one_of("unsloth"),
        "torch in this version",
        "Unsloth rewrites the libraries that this workbench trains with, so the two cannot run in one process.",
        leave_out(fields.run.backend),
    ),
    Refused(
        "max-new-tokens-need-prompts",
        fields.run.max_new_tokens,
        other_than(fields.run.max_new_tokens.default),
        "left out without prompts",
        "It is the length of sample answers. Give run.prompts, or remove it.",
        leave_out(fields.run.max_new_tokens, "remove it"),
        beside={fields.run.prompts: not_},
    ),
    *(
        Refused(
            f"{spec.name.replace('_', '-')}-needs-push-to-hub",
            spec,
            other_than(spec.default),
            "left out without run.push_to_hub",
            "Nothing is sent to a hub otherwise. Set run.push_to_hub: true, or remove it.",
            Fix("push to the hub", {fields.run.push_to_hub.path: True}),
            beside={fields.run.push_to_hub: not_},
        )
        for spec in (
            fields.run.hub_model_id,
            fields.run.hub_strategy,
            fields.run.hub_private_repo,
            fields.run.hub_wait_seconds,
        )
    ),
    *(
        Refused(
            f"{tracker}-needs-its-package",
            fields.run.report_to,
            partial(_holds, tracker),
            f"left without {tracker} where the package {package} is missing",
            f"Install it with `pip install {package}`, or remove {tracker}.",
            without=package,
        )
        for tracker, package in TRACKERS.items()
    ),
)


@rule(reads=(fields.run.report_to,))
def trackers_are_known(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec, given = fields.run.report_to, config.run.report_to
    if odd := [name for name in given if name not in TRACKERS]:
        # transformers calls a tracker by its package.
        ours = {package: name for name, package in TRACKERS.items()}
        known = list(TRACKERS)
        meant = (ours.get(name, nearest(name, known)) for name in given)
        rest = list(dict.fromkeys(filter(None, meant)))
        todo = "A run keeps its curves in its own folder, whatever trackers there are."
        fix = Fix(f"take {', '.join(rest)}", {spec.path: rest}) if rest else leave_out(spec, "remove it")
        yield must(spec.path, f"of {', '.join(known[:-1])} and {known[-1]}", ", ".join(odd), todo, fix=fix)


@rule(reads=(fields.run.push_to_hub, fields.run.hub_model_id, fields.model.name))
def a_push_names_a_repository_of_its_own(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec, given = fields.run.hub_model_id, config.run.hub_model_id
    if not config.run.push_to_hub:
        return
    if given is None or not is_repository(given):
        todo = "Name it, such as me/my-model; it is made where there is none."
        yield must(spec.path, "a repository as owner/name with run.push_to_hub", given or "nothing", todo)
    elif given.lower() == config.model.name.lower():
        todo = "Its weights would be written over by those of this run. Name another repository."
        yield must(spec.path, "another repository than that of model.name", given, todo)


@rule(reads=(fields.run.notify,))
def an_address_to_notify_is_one(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec, given = fields.run.notify, config.run.notify
    if given is not None and not host_of(given):
        # The address itself is a secret, also where it is wrong.
        todo = "Write it with its beginning, such as https://ntfy.sh/a-name-of-yours, or remove it."
        yield must(spec.path, "an http or https address", "something else", todo, fix=leave_out(spec, "remove it"))


@rule(reads=(fields.run.prompts, fields.run.prompts_steps))
def prompts_steps_need_prompts(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if not config.run.prompts:
        todo = "There is nothing to sample. Give run.prompts, or remove it."
        yield from _left_out(fields.run.prompts_steps, "without prompts", todo, config, facts)


@rule(reads=(fields.run.prompts,))
def prompts_are_not_empty(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for index, prompt in enumerate(config.run.prompts):
        if not prompt.strip():
            path = f"{fields.run.prompts.path}.{index}"
            yield must(path, "a text", prompt, "Write the prompt or remove it.", fix=Fix("remove it", unset=(path,)))


@rule(reads=(fields.data.eval, fields.data.val_set_size, fields.run.eval_steps))
def eval_steps_need_held_out_data(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if not config.data.evaluates:
        todo = "There is nothing to evaluate on. Name data.eval, give data.val_set_size, or remove it."
        yield from _left_out(fields.run.eval_steps, "without held-out data", todo, config, facts)


def _left_out(spec: FieldSpec, without: str, todo: str, config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """That a person has written a setting for which the config has no use; `auto` and a stored config are silent."""
    value = spec.value(config)
    if value != "auto" and spec.path in facts.given and not _is_resolved(facts):
        yield must(spec.path, f"left out {without}", value, todo, fix=leave_out(spec, "remove it"))


@rule(reads=(fields.run.eval_steps, fields.run.evals_per_epoch, fields.run.save_steps, fields.run.saves_per_epoch))
def steps_or_times_in_an_epoch(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """One of the two says how often; a stored config has what the other one became."""
    for spec, steps in _BY_EPOCH:
        value = spec.value(config)
        if (
            value is not None
            and steps.path in facts.given
            and steps.value(config) != "auto"
            and not _is_resolved(facts)
        ):
            todo = "Both say how often. Remove one of them."
            yield must(
                spec.path, f"left out beside {steps.path}", value, todo, fix=Fix("remove it", unset=(spec.path,))
            )


_BY_EPOCH = (
    (fields.run.evals_per_epoch, fields.run.eval_steps),
    (fields.run.saves_per_epoch, fields.run.save_steps),
)


@rule(reads=(fields.run.evals_per_epoch, fields.run.saves_per_epoch, fields.data.streaming))
def epochs_of_a_stream_have_no_known_steps(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for spec, steps in _BY_EPOCH if config.data.streaming else ():
        if (value := spec.value(config)) is not None:
            todo = f"How many steps an epoch has is known once it is over. Take {steps.path}."
            fix = Fix("remove it", unset=(spec.path,))
            yield must(spec.path, "left out while rows are streamed", value, todo, fix=fix)


@rule(reads=(fields.run.evals_per_epoch, fields.data.eval, fields.data.val_set_size))
def evaluations_need_held_out_data(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec = fields.run.evals_per_epoch
    if config.run.evals_per_epoch is not None and not config.data.evaluates:
        todo = "There is nothing to evaluate on. Name data.eval, give data.val_set_size, or remove it."
        fix = Fix("remove it", unset=(spec.path,))
        yield must(spec.path, "left out without held-out data", config.run.evals_per_epoch, todo, fix=fix)


_OF_HELD_OUT = (
    fields.optim.early_stopping_patience,
    fields.run.metric_for_best_model,
    fields.run.greater_is_better,
    fields.run.save_best,
)


@rule(reads=(*_OF_HELD_OUT, fields.data.eval, fields.data.val_set_size))
def the_best_is_told_by_held_out_rows(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for spec in () if config.data.evaluates else _OF_HELD_OUT:
        if (value := spec.value(config)) != spec.default:
            todo = "Nothing is measured that could tell. Name data.eval, give data.val_set_size, or remove it."
            fix = Fix("remove it", unset=(spec.path,))
            yield must(spec.path, "left out without held-out data", value, todo, fix=fix)


@rule(reads=(fields.optim.early_stopping_threshold, fields.optim.early_stopping_patience))
def a_threshold_needs_patience(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec, optim = fields.optim.early_stopping_threshold, config.optim
    if optim.early_stopping_threshold and optim.early_stopping_patience is None:
        todo = "No run ends early without it: set it to a number of evaluations, or remove the threshold."
        rule_text = "left out while optim.early_stopping_patience is empty"
        yield must(spec.path, rule_text, optim.early_stopping_threshold, todo, fix=Fix("remove it", unset=(spec.path,)))


def _is_resolved(facts: Facts) -> bool:
    """Whether the file is a stored, resolved config, in which every setting is written."""
    return fields.run.grace_seconds.path in facts.given and fields.kernels.kernel_auto_compose.path in facts.given


def _steps(count: int) -> str:
    return f"{count:,} step{'s' if count != 1 else ''}"


@rule(reads=(fields.run.save_steps, fields.run.saves_per_epoch, *_LENGTH))
def a_checkpoint_falls_in_the_run(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    steps, path = total_steps(config, facts), fields.run.save_steps.path
    if steps is not None and config.run.save_steps >= steps and config.run.saves_per_epoch is None:
        todo = "Only its end is kept: a run that is cut off earlier starts again."
        every = max(1, steps // 4)
        yield must(
            path,
            f"less than the {_steps(steps)} of the run",
            config.run.save_steps,
            todo,
            severity="warning" if steps > 50 else "hint",  # a short run loses little; the note is for what would hurt
            fix=Fix("every step" if every == 1 else f"every {every} steps", {path: every}),
        )


@rule(reads=(fields.run.eval_steps, fields.run.evals_per_epoch, fields.data.eval, fields.data.val_set_size, *_LENGTH))
def an_evaluation_falls_in_the_run(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.run.evals_per_epoch is not None:
        return  # a number of steps only stands for it until an epoch's are known
    steps, path, every = total_steps(config, facts), fields.run.eval_steps.path, config.run.eval_steps
    if config.data.evaluates and steps is not None and every != "auto" and every > steps:
        yield must(
            path,
            f"at most the {_steps(steps)} of the run",
            every,
            "Otherwise it never happens.",
            fix=Fix("ten times a run", {path: "auto"}),
        )


@rule(reads=(fields.run.prompts, fields.run.prompts_steps, *_LENGTH))
def a_sample_falls_in_the_run(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    steps, path, every = total_steps(config, facts), fields.run.prompts_steps.path, config.run.prompts_steps
    if config.run.prompts and steps is not None and every != "auto" and every >= steps:
        yield must(
            path,
            f"less than the {_steps(steps)} of the run",
            every,
            "Prompts are answered at its start and its end alone, as they always are.",
            severity="warning" if steps > 50 else "hint",
            fix=Fix("ten times a run", {path: "auto"}),
        )


@rule(reads=(fields.distributed.nodes,))
def nodes_exist(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Of a cluster that is described: all of its nodes are used, and no more than there are."""
    spec, here = fields.distributed.nodes, facts.machine.nodes if facts.machine else None
    if here is None or config.distributed.nodes == here:
        return
    fix = Fix("use each node" if here > 1 else "one machine", {spec.path: here})
    if config.distributed.nodes > here:
        yield must(spec.path, f"at most {here}", config.distributed.nodes, "The cluster has no more nodes.", fix=fix)
    else:
        todo = "The others would have nothing to do."
        yield must(spec.path, f"{here} to use each node", config.distributed.nodes, todo, severity="hint", fix=fix)


@rule(reads=(fields.run.devices,))
def devices_exist(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    devices, path, machine = config.run.devices, fields.run.devices.path, facts.machine
    if isinstance(devices, list) and len(set(devices)) != len(devices):
        yield must(
            path,
            "each GPU once",
            devices,
            "Take the double ones out.",
            fix=Fix("each once", {path: sorted(set(devices))}),
        )
    if isinstance(devices, list) and not devices:
        yield must(
            path,
            "auto, a number or a list of GPU numbers",
            devices,
            "Leave it out for auto.",
            fix=Fix("auto", {path: "auto"}),
        )
    if machine is None or devices == "auto":
        return
    fix = Fix("auto", {path: "auto"})
    if not machine.gpus:
        if isinstance(devices, list) and devices:
            yield must(path, "auto on a machine without GPU", devices, "Training runs on the CPU there.", fix=fix)
        elif isinstance(devices, int) and machine.cpu_count is not None and devices > machine.cpu_count:
            todo = "Without a GPU each device is a process that needs a core of its own."
            rule_text = f"at most {machine.cpu_count}, the CPU cores of this machine"
            yield must(
                path, rule_text, devices, todo, fix=Fix(f"set it to {machine.cpu_count}", {path: machine.cpu_count})
            )
    elif isinstance(devices, list):
        missing = [index for index in devices if index >= len(machine.gpus)]
        if missing:
            yield must(
                path, f"GPU numbers from 0 to {len(machine.gpus) - 1}", devices, "The machine has no others.", fix=fix
            )
    elif devices > len(machine.gpus):
        yield must(path, f"at most {len(machine.gpus)}", devices, "The machine has no more GPUs.", fix=fix)


@rule(reads=(fields.run.name,))
def the_name_fits_a_folder(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    name, path = config.run.name, fields.run.name.path
    if name is not None and (
        not name.strip() or len(name) > 100 or "/" in name or "\0" in name or name.strip(". ") == ""
    ):
        todo = "The run folder is named after it: take letters, digits and hyphens."
        yield must(
            path, "a name of at most 100 characters without slashes", name, todo, fix=Fix("remove it", unset=(path,))
        )


BESIDE_CHECKPOINTS = 128 << 20
"""Bytes that a run needs beside its checkpoints, without which `engine.run.launch` starts none."""


@rule(
    reads=(fields.model.name, fields.model.dtype, fields.adapter.kind, fields.run.save_total_limit, fields.optim.optim)
)
def checkpoints_fit_the_disk(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Kept checkpoints and the one being written lie there at once."""
    checkpoint = checkpoint_bytes(config, facts)
    free = facts.machine.disk_free_bytes if facts.machine else None
    if checkpoint is None or free is None:
        return
    need = checkpoint * (config.run.save_total_limit + 1)
    path = fields.run.save_total_limit.path
    if need + BESIDE_CHECKPOINTS > free:
        sentence = (
            f"the checkpoints will need {figures.size(need)} ({figures.size(checkpoint)} each), curves, log and what saving needs to "
            f"end well {figures.size(BESIDE_CHECKPOINTS)}, and {figures.size(free)} are free. Free some space, keep fewer, train an "
            "adapter, or choose another folder of runs (run.output_dir or --runs)."
        )
        fewer = int((free - BESIDE_CHECKPOINTS) // checkpoint) - 1
        fix = Fix(f"keep {fewer}", {path: fewer}) if 2 <= fewer < config.run.save_total_limit else None
        yield notice(path, sentence, severity="error", fix=fix)
    elif need > 0.8 * free:
        yield notice(path, f"the checkpoints will take {figures.size(need)} of the {figures.size(free)} that are free.")
