"""Rules about an adapter that is trained further: it is there, fits its model, is what it was, and is what rewards are held to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.config.adapter_folder import OF_THE_FOLDER, adapter_of
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must, notice, shown
from engine.config.kinds import BUILTIN_MODELS
from engine.config.rule import Refused, leave_out, one_of, refused, rule, several, take
from engine.config.tree import RunConfig, fields
from engine.errors import visible
from engine.facts.counts import known_model

PATH, _REFERENCE, _EXPERTS = fields.adapter.path, fields.method.reference, fields.distributed.expert_parallel_size

refused(
    __name__,
    Refused(
        "the-adapter-is-part-of-the-reference",
        _REFERENCE,
        one_of("copy", "adapter_off"),
        "adapter_copy while adapter.path is set",
        "The model without that adapter is what it was before the adapter learned, and rewards begin away from 0.",
        take(_REFERENCE, "adapter_copy", "keep the adapter as it began"),
        beside={PATH: bool},
        severity="warning",
    ),
    Refused(
        "a-copy-of-an-adapter-needs-one-that-learned",
        _REFERENCE,
        one_of("adapter_copy"),
        "auto while adapter.path is empty",
        "A new adapter adds nothing as it begins, so switched off it is the same.",
        leave_out(_REFERENCE, "take what follows by itself"),
        beside={PATH: one_of(None, "")},
    ),
    Refused(
        "divided-experts-begin-anew",
        PATH,
        bool,
        "left out with distributed.expert_parallel_size {config.distributed.expert_parallel_size}",
        "Each process has its part of the experts' adapters, and files hold them whole. Merge the adapter into its model first.",
        leave_out(_EXPERTS, "keep experts together"),
        beside={_EXPERTS: several},
    ),
)


@rule(reads=(PATH,))
def the_adapter_is_there(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    known = adapter_of(config, facts)
    if known is not None and known.problem:
        sentence = known.problem if known.problem.endswith(".") else f"{known.problem}."
        yield notice(
            PATH.path, f"{sentence} {known.todo}", severity="error", fix=leave_out(PATH, "begin a new adapter")
        )


@rule(reads=(PATH,))
def the_adapter_is_the_one_meant_and_stays(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    known = adapter_of(config, facts)
    if known is not None and known.note and not known.problem:
        yield notice(PATH.path, known.note)


@rule(reads=(PATH, fields.model.name, *OF_THE_FOLDER))
def an_adapter_stays_what_it_was(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    known = adapter_of(config, facts)
    for spec in OF_THE_FOLDER if known is not None and not known.problem else ():
        assert known is not None
        given, trained = spec.value(config), known.settings[spec.name]
        if _alike(given) != _alike(trained) and not _are_all_linear(given, trained, config, facts):
            todo = "Its weights were trained with that; leave it out, or begin a new adapter without adapter.path."
            rule_text = f"{shown(trained)}, as the adapter in adapter.path has it"
            yield must(spec.path, rule_text, given, todo, fix=Fix("take what it has", unset=(spec.path,)))


def _are_all_linear(given: Any, trained: Any, config: RunConfig, facts: Facts) -> bool:
    """Whether names are those of all linear layers of a model of text, as which PEFT writes them down."""
    model = known_model(config, facts)
    if given != "all-linear" or model is None or not model.linears or model.tower or model.projector:
        return False
    return isinstance(trained, list) and set(trained) == {name for name, *_ in model.linears}


def _alike(value: Any) -> Any:
    """A list of names in whatever order."""
    return sorted(value, key=str) if isinstance(value, list) else value


@rule(reads=(PATH, fields.model.name))
def an_adapter_fits_its_model(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """By the shapes of its matrices; layers of an unknown name may be of a part that the facts do not list."""
    known, model = adapter_of(config, facts), known_model(config, facts)
    if known is None or known.problem or model is None or not model.linears:
        return
    sizes: dict[str, set[tuple[int, int]]] = {}
    for name, wide_in, wide_out, _ in (*model.linears, *model.tower, *model.projector):
        sizes.setdefault(name, set()).add((wide_in, wide_out))
    for name, wide_in, wide_out in known.linears:
        if name in sizes and (wide_in, wide_out) not in sizes[name]:
            own = " or ".join(f"{width} to {height}" for width, height in sorted(sizes[name]))
            yield notice(
                PATH.path,
                f"the adapter is on {visible(name)} from {wide_in} to {wide_out} numbers, and in {visible(model.name)} that layer "
                f"goes from {own}. Name the model that it was trained beside"
                + (f": {shown(known.base)}." if known.base else "."),
                severity="error",
            )
            return
    if known.base and not _same_model(known.base, config.model.name):
        yield notice(
            PATH.path,
            f"the adapter was trained beside {shown(known.base)}, and model.name is {shown(config.model.name)}. Its matrices fit, "
            "and mean something beside the weights that they were trained with alone.",
        )


def _same_model(one: str, other: str) -> bool:
    """Whether two names may stand for one model: a folder is often named as the model on the hub, which may lie anywhere, and
    the built-in ones lie in a cache."""
    if other in BUILTIN_MODELS and f"/{other}-" in one:
        return True
    return one.rstrip("/").rpartition("/")[2].lower() == other.rstrip("/").rpartition("/")[2].lower()
