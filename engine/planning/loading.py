"""Loader processes: how many `data.dataloader_num_workers: auto` takes, by cores, images and the time of a step, and the memory
that images take in them. Pure and quick."""

from __future__ import annotations

import math

from engine import figures
from engine.config.facts import Facts
from engine.config.tree import RunConfig
from engine.facts import counts
from engine.planning import memory_model, speed

MEGAPIXEL_SECONDS = 0.032
"""What a core takes to read an image of a million pixels, resize it and cut it into patches (JPEG, Qwen2.5-VL's processor on
Pillow, EPYC)."""
IDLE = 0.03
"""Below this share of a step, reading is not worth processes of its own, which begin anew with each epoch."""
SPARE = 1.25
"""So many times what feeds a step on average: images and rows differ."""
NOT_KNOWN = 2
"""Processes where the time of a step is not known."""
SHARED = 0.5
"""Share of the machine's shared memory that batches may take which wait."""
KEPT = 0.25
"""Share of a process's main memory that images may take which are kept."""


def chosen(config: RunConfig, facts: Facts) -> tuple[int, str]:
    """What `auto` becomes, with its reason."""
    if config.method.rows == "prompts":
        return 0, "images are read where answers are sampled"
    found = images_of_a_batch(config, facts)
    if found is None:
        return 0, "no images are seen in the rows"
    images, pixels = found
    machine = facts.machine
    if machine is None:
        return 0, "the machine is not known yet; chosen at launch"
    if not machine.gpus:
        return 0, "the step is computed by the same cores"
    reading, computing = MEGAPIXEL_SECONDS * images * pixels / 1e6, _batch_seconds(config, facts)
    takes = f"the images of a batch take a core {figures.brief(reading)}"
    if computing is None:
        wanted, why = NOT_KNOWN, f"{takes}; how long a batch is computed is not known yet"
    elif reading <= IDLE * computing:
        return 0, f"{takes}, little beside the {figures.brief(computing)} that it is computed"
    else:
        wanted = math.ceil(SPARE * reading / computing)
        why = f"{takes}, and it is computed in {figures.brief(computing)}"
    room, limit = _room(config, facts, images, pixels)
    if wanted <= room:
        return wanted, why
    return room, f"{why}: {wanted:,} would feed it, but {limit}"


def all_waiting_bytes(config: RunConfig, facts: Facts, processes: int) -> int:
    """Shared memory of the batches that wait in so many loader processes of each training process of a machine."""
    found = images_of_a_batch(config, facts)
    if found is None or config.method.rows == "prompts":
        return 0
    ahead = processes * config.data.dataloader_prefetch_factor * counts.devices_a_node(config)
    return int(ahead * waiting_bytes(config, facts, *found))


def _room(config: RunConfig, facts: Facts, images: float, pixels: float) -> tuple[int, str]:
    """How many loader processes each training process can have, and what bounds them."""
    machine, devices, asked = facts.machine, counts.devices_a_node(config), config.data
    bounds = [(64, "64 are the most")]
    if machine is None:
        return bounds[0]
    if machine.cpu_count is not None:
        cores = f"{machine.cpu_count:,} cores" if machine.cpu_count > 1 else "one core"
        bounds.append((max(0, machine.cpu_count // devices - 1), f"this machine has {cores}" + _for(devices)))
    if (batches := counts.batches_per_epoch(config, facts)) is not None:
        bounds.append((batches, f"an epoch has {batches:,} batch{'' if batches == 1 else 'es'}"))
    if machine.memory_bytes is not None and asked.image_cache_size:
        each = asked.image_cache_size * memory_model.MiB
        bounds.append(
            (
                int(KEPT * machine.memory_bytes / devices / each),
                f"each keeps {figures.size(each)} of images in the {figures.size(machine.memory_bytes)} of this machine"
                + _for(devices),
            )
        )
    if (shared := machine.shared_memory_bytes) is not None:
        waiting = asked.dataloader_prefetch_factor * waiting_bytes(config, facts, images, pixels)
        words = f"{figures.size(shared)} of shared memory (/dev/shm) hold batches for no more"
        bounds.append((int(SHARED * shared / devices / waiting), words + _for(devices)))
    return min(bounds, key=lambda bound: bound[0])


def _for(devices: int) -> str:
    return f" for {devices:,} training processes" if devices > 1 else ""


def waiting_bytes(config: RunConfig, facts: Facts, images: float, pixels: float) -> float:
    """Shared memory of one batch that waits. Processors that keep an image's shape send its pixels as bytes, others as float32."""
    model, data = facts.model, config.data
    plain = model is not None and bool(model.keeps_shape) and data.image_backend != "torchvision"
    seen = pixels if data.max_pixels is None else min(pixels, data.max_pixels)
    return max(1.0, images * seen * (3 if plain else 12))


def images_of_a_batch(config: RunConfig, facts: Facts) -> tuple[float, float] | None:
    """Images of a batch on one device, and pixels of each on average; None where there are none, as far as is known."""
    data, batch = facts.data, config.optim.per_device_train_batch_size
    if not memory_model.may_see(config, facts):
        return None
    if data is None or not data.images or not data.rows:
        return float(batch), 1e6
    return batch * data.images / data.rows, (data.image_pixels or 1e6 * data.images) / data.images


def _batch_seconds(config: RunConfig, facts: Facts) -> float | None:
    """How long a card computes a batch by what is known of model and rows."""
    parameters, data = counts.parameters(config, facts), facts.data
    batches = counts.batches_per_epoch(config, facts)
    if parameters is None or data is None or not data.tokens or not batches:
        return None
    return speed.card_batch_seconds(config, facts, parameters, data.tokens / batches)
