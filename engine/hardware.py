"""What this machine is, or what another one would be: GPUs through NVML, memory, disk. Never torch.

`parse_machine("1xH100-80GB")` describes a machine that is not here, so that a config can be checked on a laptop.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from engine.errors import UsageError, nearest, visible
from engine.figures import size

GiB = 1024**3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: its name, its memory in bytes and its compute capability."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Machine:
    """What training has to live with. `disk_free_bytes` is `None` where nobody can know it."""

    gpus: tuple[Gpu, ...] = ()
    cpu_count: int | None = None
    memory_bytes: int | None = None
    disk_free_bytes: int | None = None
    name: str = ""
    slow_bfloat16: bool = False
    """Whether its processor has no instructions for bfloat16: torch then multiplies it forty times slower than float32
    (2.5e9 for 1.0e11 operations a second and core, torch 2.13 held to AVX2)."""
    shared_memory_bytes: int | None = None
    """What processes may share with each other in `/dev/shm`, which a container often has little of."""
    cpu_share: float = 1.0
    """What a run that wants all of the cores would get of them beside what ran in the last minute."""
    nodes: int | None = None
    """How many such machines a cluster has, where one is described; `None` where nobody said."""

    @property
    def device(self) -> str:
        """`cuda` or `cpu`: where training would run."""
        return "cuda" if self.gpus else "cpu"


# name -> (sizes sold in GB, compute capability)
CARDS: dict[str, tuple[tuple[int, ...], tuple[int, int]]] = {
    "B300": ((288,), (10, 3)),
    "B200": ((192, 180), (10, 0)),
    "H200": ((141,), (9, 0)),
    "GH200": ((96, 144), (9, 0)),
    "H100": ((80, 94), (9, 0)),
    "H800": ((80,), (9, 0)),
    "H20": ((96,), (9, 0)),
    "A100": ((80, 40), (8, 0)),
    "A800": ((80,), (8, 0)),
    "A30": ((24,), (8, 0)),
    "A10": ((24,), (8, 6)),
    "A10G": ((24,), (8, 6)),
    "A40": ((48,), (8, 6)),
    "A6000": ((48,), (8, 6)),
    "A5000": ((24,), (8, 6)),
    "A4000": ((16,), (8, 6)),
    "L4": ((24,), (8, 9)),
    "L40": ((48,), (8, 9)),
    "L40S": ((48,), (8, 9)),
    "RTX6000ADA": ((48,), (8, 9)),
    "RTXPRO6000": ((96,), (12, 0)),
    "RTX5090": ((32,), (12, 0)),
    "RTX5080": ((16,), (12, 0)),
    "RTX4090": ((24,), (8, 9)),
    "RTX4080": ((16,), (8, 9)),
    "RTX4070": ((12,), (8, 9)),
    "RTX3090": ((24,), (8, 6)),
    "RTX3080": ((10, 12), (8, 6)),
    "RTX3060": ((12,), (8, 6)),
    "RTX2080TI": ((11,), (7, 5)),
    "T4": ((16,), (7, 5)),
    "V100": ((32, 16), (7, 0)),
    "P100": ((16,), (6, 0)),
}
TAKEN_FOR = "A100"
"""Whose compute capability a described card has that is none of these."""

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bfloat16 products in FLOP/s by the vendor's data sheets, by a part of a card's name; other cards show no MFU."""

_FORM = "a card as in `1xH100-80GB`, `2xA100-40GB`, `RTX4090` or `cpu`, or nodes of them as in `2x8xH100-80GB`"
_MACHINE = re.compile(
    r"(?:(?:(?P<nodes>\d{1,4})\s*[x*]\s*)?(?P<count>\d{1,4})\s*[x*]\s*)?(?P<card>[1-9]0[6-9]0|[A-Za-z][A-Za-z0-9 _-]*?)(?:[-_ ](?P<size>\d{1,4}(?:\.\d+)?)\s*(?:GB|GiB|G))?",
    re.IGNORECASE,
)


def parse_machine(text: str) -> Machine:
    """The machine that `1xH100-80GB` names: count, card, memory; the last may be left out for a known card. `2x8xH100` is a
    cluster of two such machines with eight cards each.

    Raises UsageError when it names none.
    """
    if text.strip().lower() == "cpu":
        memory, slow = _memory_bytes(), _slow_bfloat16()
        return Machine(cpu_count=os.cpu_count(), memory_bytes=memory, name="cpu", slow_bfloat16=slow)
    match = _MACHINE.fullmatch(text.strip()) if len(text) < 80 else None
    if not match:
        raise UsageError(f"--for: must be {_FORM}; got {visible(text[:60])}.")
    count = int(match["count"] or 1)
    if not 1 <= count <= 1024:
        raise UsageError(f"--for: must be between 1 and 1024 cards; got {count}.")
    nodes = None if match["nodes"] is None else int(match["nodes"])
    if nodes is not None and not 1 <= nodes <= 1024:
        raise UsageError(f"--for: must be between 1 and 1024 nodes; got {nodes}.")
    card = re.sub(r"[ _-]", "", match["card"]).upper().removeprefix("NVIDIA").removeprefix("GEFORCE")
    if card not in CARDS and f"RTX{card}" in CARDS:
        card = f"RTX{card}"
    sizes, capability = CARDS.get(card, ((), CARDS[TAKEN_FOR][1]))
    if not sizes and not match["size"]:
        close = nearest(card, CARDS)
        todo = f"Did you mean {close}?" if close else "Give its memory too, as in `1xMyCard-48GB`."
        raise UsageError(f"--for: must be {_FORM}; got {visible(text)}, a card this version does not know. {todo}")
    size = float(match["size"] or sizes[0])
    if not 1 <= size <= 2000:
        raise UsageError(f"--for: must name between 1 and 2000 GB of memory; got {size:g}.")
    gpu = Gpu(card, _usable(size), capability)
    several = "" if nodes is None else f"{nodes}x"
    return Machine(gpus=(gpu,) * count, name=f"{several}{count}x{card}-{size:g}GB", nodes=nodes)


def is_unknown(gpu: Gpu) -> bool:
    """Whether it is only described (`--for`), by a name that stands for no card here: it is taken for TAKEN_FOR."""
    return " " not in gpu.name and gpu.name not in CARDS


def _usable(size: float) -> int:
    """Bytes that a card sold with `size` GB offers: an H100 80 GB shows 79.6 GiB, a 24 GB card about 23.6."""
    return int(size * GiB * 0.985)


def this_machine(folder: str | Path = ".") -> Machine:
    """This machine, and the free disk where `folder` is. A machine without NVIDIA driver has no GPUs."""
    gpus = _gpus()
    return Machine(
        gpus=gpus,
        cpu_count=_cpu_count(),
        memory_bytes=_memory_bytes(),
        disk_free_bytes=disk_free(folder),
        name=_machine_name(gpus),
        slow_bfloat16=_slow_bfloat16(),
        shared_memory_bytes=_shared_memory_bytes(),
        cpu_share=_cpu_share(int(time.monotonic() // 60)),
    )


def existing_folder(place: Path) -> Path:
    """The folder itself, or the nearest one above that is there: where it would be made."""
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def disk_free(folder: str | Path) -> int | None:
    """Free bytes where `folder` is or would be made; nothing when the place cannot be asked."""
    try:
        space = os.statvfs(existing_folder(Path(folder).expanduser().absolute()))
        return space.f_bavail * space.f_frsize
    except (OSError, AttributeError):
        return None


_LINKS = {0: "one board", 10: "one PCIe switch", 20: "several PCIe switches", 30: "the PCIe host bridge",
          40: "the host bridges of one processor", 50: "the processors' own link"}  # fmt: skip
"""What NVML calls the nearest that two GPUs have in common."""


def gpu_links() -> dict[str, int]:
    """Over what the GPUs of this machine reach each other, each with the number of pairs; empty where that is not known."""
    return _query_driver(_links, {})


def _links(pynvml: ModuleType, handles: list[object]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one, other in itertools.combinations(handles, 2):
        status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == pynvml.NVML_P2P_STATUS_OK:
            words = "NVLink"
        else:
            words = _LINKS.get(int(pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other)), "an unknown link")
        found[words] = found.get(words, 0) + 1
    return found


@cache
def _gpus() -> tuple[Gpu, ...]:
    return _query_driver(lambda pynvml, handles: tuple(_gpu(pynvml, handle) for handle in handles), ())


_Answer = TypeVar("_Answer")


def _query_driver(ask: Callable[[ModuleType, list[object]], _Answer], otherwise: _Answer) -> _Answer:
    """What NVIDIA's driver says of its GPUs, or this where there is none or it does not answer."""
    if not os.path.exists("/proc/driver/nvidia") and not os.path.exists("/dev/nvidiactl") and os.name != "nt":
        return otherwise
    try:
        import pynvml
    except ImportError:
        return otherwise
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return otherwise
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return ask(pynvml, handles)
    except pynvml.NVMLError:
        return otherwise
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: ModuleType, handle: object) -> Gpu:
    name = pynvml.nvmlDeviceGetName(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(visible(name if isinstance(name, str) else name.decode()), total, (int(major), int(minor)))


def _cpu_count() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count()


@lru_cache(maxsize=1)
def _cpu_share(minute: int) -> float:
    """Each of so many threads gets an equal share. In tenths and once a minute: the load is a mean that never stands still,
    and two looks at one config must not differ by it."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return 1.0
    # The load is that of the whole machine, also where this process may use a part of its cores alone.
    return max(round(min(1.0, (os.cpu_count() or 1) / ((_cpu_count() or 1) + load)), 1), 0.1)


@cache
def _slow_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """True for an x86 processor without AVX-512 and without AVX's conversions; false where nothing is known."""
    try:
        with open(cpuinfo, encoding="utf-8", errors="replace") as file:
            text = file.read(16_384)  # the first of its processors; a large machine has hundreds
    except OSError:
        return False
    line = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    known = set(line[1].split()) if line else {"avx_ne_convert"}
    return not {"avx512bw", "avx512vl", "avx512dq"} <= known and "avx_ne_convert" not in known


def _shared_memory_bytes() -> int | None:
    try:
        space = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return None
    # All of it, not what is free: two looks at one config must not differ by what others do.
    return space.f_blocks * space.f_frsize


@cache
def _memory_bytes() -> int | None:
    """The machine's memory, or the container's limit where that is lower."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and 0 < int(text) < total:
            return int(text)
    return total


def free_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """How much main memory may still be taken: what the machine has free, or the container's limit leaves where that is less.
    Files that were read and can be read again take none."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, used, kinds, files in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            most, taken = (int((cgroup / name).read_text()) for name in (limit, used))
            lines = (cgroup / kinds).read_text().splitlines()
        except (OSError, ValueError):  # no container, or one without a limit
            continue
        dropped = next((int(line.split()[1]) for line in lines if line.startswith(f"{files} ")), 0)
        free = min(free, max(most - taken + dropped, 0))
    return free


def _machine_name(gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return f"{os.uname().machine if hasattr(os, 'uname') else 'this machine'}, no GPU"
    names = {gpu.name for gpu in gpus}
    first = gpus[0].name.removeprefix("NVIDIA ")
    return (
        f"{len(gpus)} x {first}"
        if len(names) == 1 and len(gpus) > 1
        else ", ".join(sorted(names))
        if len(names) > 1
        else first
    )


@cache
def installed(package: str) -> str | None:
    """The installed version of a distribution, by the name of the folder of its metadata; nothing when it is not installed."""
    names = (package, *_SMALLER.get(package, ()))
    known, others = _distributions()
    for name in map(_one_spelling, names):
        version, folder = known.get(name, ("", ""))
        if folder and os.path.isfile(os.path.join(folder, "METADATA")):  # an uninstall can leave an empty folder
            return version
    if not others:
        return None
    from importlib import metadata  # it brings a parser of mails, a twentieth of a check

    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


@cache
def _distributions() -> tuple[dict[str, tuple[str, str]], bool]:
    """Versions as the names of `*.dist-info` tell them (packaging.python.org, recording installed projects), and these folders, the
    first on the path; and whether there may be others, in archives or of an older kind."""
    found: dict[str, tuple[str, str]] = {}
    others = False
    for place in sys.path:
        try:
            entries = os.listdir(place or os.curdir)
        except OSError:
            others |= os.path.isfile(place)
            continue
        for entry in entries:
            if entry.endswith(".dist-info"):
                name, _, version = entry.removesuffix(".dist-info").partition("-")
                found.setdefault(_one_spelling(name), (version, os.path.join(place, entry)))
            others |= entry.endswith((".egg", ".egg-info", ".egg-link"))
    return found, others


def _one_spelling(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


_SMALLER = {"mlflow": ("mlflow-skinny",)}
"""Distributions that bring the same package with less beside it."""


def machine_text(machine: Machine | None) -> str:
    """The machine in a few words."""
    if machine is None:
        return "this machine"
    if machine.gpus:
        gpu = machine.gpus[0]
        many = f"{len(machine.gpus)} x " if len(machine.gpus) > 1 else ""
        return visible(f"{many}{gpu.name.removeprefix('NVIDIA ')}, {size(gpu.memory_bytes)}")
    return f"CPU, {machine.cpu_count or '?'} cores, {size(machine.memory_bytes)}"
