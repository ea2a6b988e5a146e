"""How many loader processes `auto` takes, and what images that are kept take: by cores, images, the time of a step, memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config.facts import DataFacts, Facts
from engine.facts.model_shape import model_facts
from engine.hardware import GiB, Machine, parse_machine
from engine.planning import loading, memory_model
from engine.planning.auto import effective, resolved
from engine.planning.estimate import estimate
from engine.rules import read

LARGE = replace(model_facts("Qwen/Qwen3-8B"), processor=True)
CARD = replace(parse_machine("1xH100-80GB"), cpu_count=16, memory_bytes=256 * GiB, shared_memory_bytes=64 * GiB)
CPU = Machine(cpu_count=4, memory_bytes=16 * GiB, name="cpu")
PATH = "data.dataloader_num_workers"


def seeing(images: int = 10_000, pixels: float = 1e6, tokens: int = 1_000) -> DataFacts:
    """Rows of one image each."""
    return DataFacts(
        rows=images, tokens=tokens * images, images=images, all_image_tokens=images, image_pixels=round(pixels * images)
    )


def config(**more: Any) -> Any:
    settings: dict[str, Any] = {
        "version": 1,
        "model": {"name": "Qwen/Qwen3-8B"},
        "adapter": {"kind": "lora"},
        "data": {"train": [{"path": "rows.jsonl"}]},
        "optim": {"per_device_train_batch_size": 8},
    }
    for name, value in more.items():
        section, _, key = name.partition("__")
        settings.setdefault(section, {})[key] = value
    return read(settings).config


def chosen(facts: Facts, **more: Any) -> tuple[int, str]:
    given = config(**more)
    (entry,) = (entry for entry in effective(given, facts) if entry.path == PATH)
    assert resolved(given, facts).data.dataloader_num_workers == entry.effective
    return entry.effective, entry.reason


def test_larger_images_and_quicker_steps_take_more_processes() -> None:
    def number(pixels: float, tokens: int) -> int:
        return chosen(Facts(machine=CARD, model=LARGE, data=seeing(pixels=pixels, tokens=tokens)))[0]

    assert [number(pixels, 1_000) for pixels in (1e4, 1e6, 4e6, 1.6e7)] == [0, 1, 2, 6]
    assert number(1.6e7, 4_000) < number(1.6e7, 1_000) < number(1.6e7, 300)
    value, reason = chosen(Facts(machine=CARD, model=LARGE, data=seeing(pixels=4e6)))
    assert value == 2
    assert reason.startswith("the images of a batch take a core 1.0 s, and it is computed in ")


@pytest.mark.parametrize(
    ("machine", "more", "value", "reason"),
    [
        ({"cpu_count": 4}, {}, 3, "this machine has 4 cores"),
        ({"cpu_count": 8}, {"run__devices": 2}, 3, "this machine has 8 cores for 2 training processes"),
        ({"cpu_count": 1}, {}, 0, "this machine has one core"),
        ({"memory_bytes": 4 * GiB}, {}, 4, "each keeps 256 MiB of images in the 4.0 GiB of this machine"),
        (
            {"memory_bytes": 6 * GiB},
            {"run__devices": 2},
            3,
            "each keeps 256 MiB of images in the 6.0 GiB of this machine for 2 training processes",
        ),
        ({"shared_memory_bytes": 64 * 2**20}, {}, 0, "64.0 MiB of shared memory (/dev/shm) hold batches for no more"),
    ],
)
def test_what_a_machine_has_bounds_them(machine: Any, more: Any, value: int, reason: str) -> None:
    here = replace(CARD, **machine)
    number, why = chosen(Facts(machine=here, model=LARGE, data=seeing(pixels=1.6e7)), **more)
    assert number == value
    assert why.endswith(f"would feed it, but {reason}")


def test_few_images_take_no_more_processes_than_batches() -> None:
    number, why = chosen(Facts(machine=CARD, model=LARGE, data=seeing(images=16, pixels=1.6e7)))
    assert (number, why.rpartition(", but ")[2]) == (2, "an epoch has 2 batches")


@pytest.mark.parametrize(
    ("facts", "more", "value", "reason"),
    [
        (Facts(machine=CPU, model=LARGE, data=seeing()), {}, 0, "the step is computed by the same cores"),
        (Facts(machine=CARD, model=LARGE, data=DataFacts(rows=9, images=0)), {}, 0, "no images are seen in the rows"),
        (Facts(model=LARGE, data=seeing()), {}, 0, "the machine is not known yet; chosen at launch"),
        (Facts(machine=CARD, model=LARGE, data=replace(seeing(), tokens=None)), {}, 2, "not known yet"),
        (
            Facts(machine=CARD, model=LARGE, data=seeing()),
            {"method__kind": "grpo", "method__reward_funcs": ["exact_match"]},
            0,
            "images are read where answers are sampled",
        ),
    ],
)
def test_where_they_are_of_no_use_or_not_known(facts: Facts, more: Any, value: int, reason: str) -> None:
    number, why = chosen(facts, **more)
    assert number == value
    assert reason in why


def test_a_batch_that_waits_has_bytes_or_floats_of_its_pixels_as_they_are_shown_to_the_model() -> None:
    def waits(keeps: bool, **more: Any) -> int:
        facts = Facts(machine=CARD, model=replace(LARGE, keeps_shape=keeps), data=seeing())
        return loading.all_waiting_bytes(config(**more), facts, processes=3)

    ahead = 3 * config().data.dataloader_prefetch_factor * 8 * 1_000_000
    assert (waits(True), waits(False)) == (3 * ahead, 12 * ahead)
    assert waits(True, data__image_backend="torchvision") == 12 * ahead
    assert waits(True, data__max_pixels=500_000) == 3 * ahead / 2
    assert waits(True, data__max_pixels=9_000_000) == waits(True), "no image is made larger"


def test_rows_of_text_have_none_and_nothing_is_said_of_them() -> None:
    facts = Facts(machine=CARD, model=replace(LARGE, processor=False), data=DataFacts(rows=9, images=0))
    assert resolved(config(), facts).data.dataloader_num_workers == 0
    assert not [entry for entry in effective(config(), facts) if entry.path == PATH]


def test_the_estimate_counts_kept_images_for_each_loader_process() -> None:
    facts = Facts(machine=CPU, model=LARGE, data=seeing())

    def kept(**more: Any) -> int:
        return estimate(config(**more), facts).memory.get("kept images", 0)

    alone = kept(data__dataloader_num_workers=0)
    assert alone == kept(data__dataloader_num_workers=1) == 256 * 2**20
    assert kept(data__dataloader_num_workers=3) == 3 * alone
    assert kept(data__dataloader_num_workers=3, data__image_cache_size=64) == 3 * 64 * 2**20
    assert kept(data__image_cache_size=0) == 0
    few = Facts(machine=CPU, model=LARGE, data=seeing(images=10, pixels=10_000))
    assert memory_model.kept_images(config(), few) == 10 * (4 * 10_000 + 1024), "never more than there are"
    text = Facts(machine=CPU, model=LARGE, data=DataFacts(rows=9, images=0))
    assert memory_model.kept_images(config(), text) == 0
