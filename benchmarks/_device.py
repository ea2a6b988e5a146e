"""The name under which a figure is recorded: the card, or the processor's model and how many cores it has here."""

from __future__ import annotations

import os
from pathlib import Path


def processor() -> str:
    """Such as `AMD EPYC, 2 cores`; the first `model name` the kernel gives."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{next(names, 'CPU')}, {cores} cores"
