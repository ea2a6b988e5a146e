"""Why a worker ended, in one sentence, and the lines of its log that matter.

It reads exit codes, the kernel's word on memory, torchrun's report on its ranks, and the end of the log. Everything it
returns is redacted and safe for a terminal.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import figures
from engine.errors import WorkbenchError, redact, visible
from engine.run import inside
from engine.run.disk import CAUSES
from engine.run.process import Identity, signal_name

MAX_LINES = 30
_TAIL_BYTES = 64 << 10
_FULL = 64 << 10
# Lines of torchrun, of progress bars and of imports that tell nothing about a fault.
_NOISE = re.compile(
    r"^\s*$|it/s\]|s/it\]|^\s*\d+%\||torch/distributed/(run|elastic|launcher)|^[=-]{10,}$|closing signal"
    r"|frozen runpy|<frozen |site-packages/torch/distributed"
    r"|^Failed to load \S+torchao/|^Failed to load CPU |^W\d{4} .*torch/utils/_pytree"
)
_RANK = re.compile(r"exitcode\s*:\s*(-?\d+).{0,40}?(?:local_rank: (\d+))?\s*\(pid: (\d+)\)", re.DOTALL)

_START = re.compile(rb"^\S+ \S+ rank \d+: process (\d+), local rank .*$", re.MULTILINE)
"""What a rank's own log says first of each start."""
_TRACEBACK = "Traceback (most recent call last)"
_AGENTS = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
_FIRST = "Root Cause (first observed failure)"


@dataclass(frozen=True)
class Cause:
    """`cause` is one of a few words for machines; `message` is the sentence for people; `lines` come from the log."""

    cause: str
    message: str
    lines: tuple[str, ...] = ()
    follows: bool = False
    """Whether it may have ended because a worker on another node had, by what its log says."""


# What cards, drivers and the network between cards say of themselves.
_PASSES = re.compile(
    r"CUDA error(?!: (?:device-side assert|out of memory))|\bNCCL\b|ProcessGroup|\bECC error|Connection (?:reset|closed) by peer"
)


def passes(final: Mapping[str, Any]) -> bool:
    """Whether what ended a worker may not end the next one: a signal from outside, a crash, a card or a network that failed.
    Numbers that diverged, rows that are refused, and room that is too small would be the same again."""
    word = str(final.get("cause") or "")
    lines = [str(final.get("message") or ""), *map(str, final.get("lines") or ())]
    crashed = word.startswith("exit ") and not any(map(_is_error, lines))
    if word.startswith("signal ") or word in ("unknown", "node lost", "hang") or crashed:
        return True
    return word.startswith(("exception", "exit ")) and _PASSES.search(" ".join(lines)) is not None


# What torch, gloo and NCCL say once the other end of a connection is gone.
_PEER = re.compile(
    r"Connection (?:reset|closed) by peer|Connection refused|Broken pipe|Dist(?:Backend|Network|Store)Error|[Tt]imed out"
    r"|remote process exited|Socket Timeout|failed to recv"
)


def of_peer(final: Mapping[str, Any]) -> bool:
    """Whether a worker's last word is that of a broken connection, which another rank's end may have left behind."""
    return _PEER.search(" ".join((str(final.get("message") or ""), *map(str, final.get("lines") or ())))) is not None


def explain(
    exit_code: int | None, log: Path, *, log_from: int = 0, out_of_memory: bool = False, who: str = "The worker"
) -> Cause:
    """The cause of an end without a final event. `exit_code` is None where nobody was there to read it.

    The log is read from the byte `log_from` on: what stands before it was written before the run was taken up again.
    """
    lines = meaningful_lines(log, log_from)
    text = "\n".join(lines)
    if out_of_memory:
        return Cause(
            "host memory",
            f"{who} was ended by the kernel because the machine ran out of memory. Use a smaller batch or model, "
            "or fewer loader processes.",
            lines,
        )
    if exit_code is None:
        return Cause("unknown", f"{who} ended without a word, and nobody was there to read its exit code.", lines)
    if exit_code < 0:
        name = signal_name(-exit_code)
        return Cause(f"signal {name}", f"{who} was ended by {name}.", _crash(log, log_from) or lines)
    if "OutOfMemoryError" in text or "CUDA out of memory" in text:
        return Cause(
            "GPU memory", f"{who} ran out of GPU memory. Use a smaller batch or gradient checkpointing.", lines
        )
    if "No space left on device" in text or free_bytes(log) < _FULL:
        # On a full disk the log itself may lack the line that says so.
        left = figures.size(free_bytes(log))
        return Cause("disk full", f"{who} ended because the disk is full ({left} free). Free some, then resume.", lines)
    for number, word in CAUSES.items():
        if f"[Errno {number}]" in text or f"(os error {number})" in text:
            return Cause(
                word, f"{who} ended because of its disk: {os.strerror(number)}. Mend that, then resume.", lines
            )
    last = next((line for line in reversed(lines) if _is_error(line)), "")
    detail = f": {last}" if last else "; its log says no more"
    follows = _PEER.search(log_tail(log, start=log_from)) is not None
    return Cause(f"exit {exit_code}", f"{who} ended with exit code {exit_code}{detail}", lines, follows)


def log_of_rank(shared: Path, log_from: int, own: Path, pid: int) -> tuple[Path, int]:
    """The log, and its byte, from which on stands why this process of a rank fell: in the shared one the last words are those of
    whoever fell last. The rank's own, where it tells there of an exception; a crash is told in the shared one alone."""
    try:
        with open(inside.open_file(own.parent, own), "rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(begin)
            data = file.read(_TAIL_BYTES)
    except (OSError, WorkbenchError):
        return shared, log_from
    starts = list(_START.finditer(data))
    if starts and int(starts[-1][1]) != pid:
        return shared, log_from
    words = starts[-1].end() if starts else 0
    return (own, begin + words) if _TRACEBACK.encode() in data[words:] else (shared, log_from)


def free_bytes(path: Path) -> int:
    try:
        space = os.statvfs(path.parent)
    except OSError:
        return _FULL
    return space.f_bavail * space.f_frsize


def _is_error(line: str) -> bool:
    return re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line) is not None


def meaningful_lines(log: Path, log_from: int = 0) -> tuple[str, ...]:
    """The last traceback if there is one, else the last lines; redacted and visible."""
    text = log_tail(log, start=log_from)
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.splitlines()]
    lines = [line for line in lines if not _NOISE.search(line)]
    starts = [place for place, line in enumerate(lines) if _TRACEBACK in line]
    if starts and any(line.startswith(_AGENTS) for line in lines[starts[-1] :]):
        lines = lines[: starts.pop()]  # torchrun's own, about ranks that failed
    if starts:
        lines = lines[starts[-1] :]
        if len(lines) > MAX_LINES:
            lines = [lines[0], "...", *lines[-(MAX_LINES - 2) :]]
    return tuple(visible(redact(line))[:500] for line in lines[-MAX_LINES:])


def _crash(log: Path, log_from: int) -> tuple[str, ...]:
    """What Python said last as it crashed: how, and where the thread was; empty where it said nothing."""
    lines = log_tail(log, start=log_from).splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if not starts:
        return ()
    rest = lines[starts[-1] :]
    place = next((place for place, line in enumerate(rest) if line.startswith("Current thread")), len(rest))
    where = itertools.takewhile(lambda line: line.startswith("  "), rest[place + 1 :])
    found = [rest[0], *rest[place : place + 1], *where]
    return tuple(visible(redact(line))[:500] for line in found[:MAX_LINES])


def log_tail(log: Path, size: int = _TAIL_BYTES, start: int = 0) -> str:
    try:
        with open(inside.open_file(log.parent, log), "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - size))
            return file.read(size).decode("utf-8", errors="replace")
    except (OSError, WorkbenchError):
        return ""


def failed_ranks(log: Path, log_from: int = 0) -> dict[int, int]:
    """Exit codes of the ranks that failed, by process, in torchrun's report, of what was written from the byte `log_from` on; the
    one that it saw fail first is the first."""
    others, _, first = log_tail(log, start=log_from).rpartition(_FIRST)
    return {int(match[3]): int(match[1]) for part in (first, others) for match in _RANK.finditer(part)}


def agent_saw_failure(log: Path, log_from: int = 0) -> bool:
    """Whether torchrun began to close the ranks because one of them failed; of starts before this one, whose words end at
    the byte `log_from`, nothing is believed."""
    return "closing signal" in log_tail(log, 8192, log_from)


def oom_kills() -> int:
    """How many processes of our control group the kernel ended for memory so far; -1 where that is not told."""
    try:
        with open("/proc/self/cgroup", encoding="ascii", errors="replace") as file:
            groups = [line.strip().split(":", 2) for line in file]
    except OSError:
        return -1
    for _, controllers, group in groups:
        if controllers == "":
            counter = Path(f"/sys/fs/cgroup{group}/memory.events")
        elif controllers == "memory":  # version 1 of control groups
            counter = Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control")
        else:
            continue
        try:
            lines = counter.read_text(encoding="ascii").splitlines()
            return int(next(line.split()[1] for line in lines if line.startswith("oom_kill ")))
        except (OSError, StopIteration, ValueError, IndexError):
            continue
    return -1


def kernel_ended(process: Identity) -> bool:
    """Whether the kernel's log says that it ended this process for memory; False where it may not be read."""
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    since = process.start / os.sysconf("SC_CLK_TCK")
    try:
        while True:
            # "priority,sequence,microseconds since boot,flags;text"; the pid may have been another's before.
            head, _, line = os.read(handle, 8192).partition(b";")
            if int(head.split(b",")[2]) / 1e6 >= since and f"Killed process {process.pid} ".encode() in line:
                return True
    except (OSError, ValueError, IndexError):
        return False
    finally:
        os.close(handle)
