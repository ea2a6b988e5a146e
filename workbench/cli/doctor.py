"""`workbench doctor`: what this machine can do, what is missing, and what would end a run. Torch-free.

Each check is one line: what was looked at, how it stands, and what to do. Exit 1 when something keeps runs from working.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from engine import hardware
from engine.errors import WorkbenchError, redact, visible
from engine.facts.state_kernels import FLA, FLA_INSTALL, MAMBA_INSTALL, TILELANG_INSTALL, unfit
from engine.figures import size
from workbench.cli.output import echo, print_json, styled

NEEDED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "pydantic", "textual")
OPTIONAL = {
    "bitsandbytes": "4-bit and 8-bit weights (QLoRA): pip install 'finetuning-workbench[gpu]'",
    "torchao": "FP8 products and int8 rounding in training: pip install 'finetuning-workbench[gpu]'",
    "flash-attn": "FlashAttention 2; torch's own attention is used without it",
    "flash-linear-attention": f"kernels for linear attention (Qwen3.5, Qwen3-Next, OLMo hybrid, Kimi Linear): {FLA_INSTALL}",
    "mamba-ssm": f"kernels for layers of state space (Mamba, Bamba, Jamba and their like): {MAMBA_INSTALL} (it compiles)",
    "liger-kernel": "Liger's kernels (kernels.use_liger_kernel): pip install liger-kernel",
    "anywidget": "the notebook: pip install 'finetuning-workbench[notebook]'",
    "pytorch-optimizer": "the optimizers ADOPT, CAME and GaLore: pip install 'finetuning-workbench[optim]'",
    "gguf": "GGUF files of a trained model: pip install 'finetuning-workbench[gguf]'",
    "llama-cpp-python": "K-quants, and llama.cpp as the judge of a GGUF: pip install llama-cpp-python (it compiles)",
    "lm-eval": "tasks of lm-evaluation-harness: pip install lm-eval",
    "mcp": "configs and runs for coding assistants (`workbench mcp`): pip install 'finetuning-workbench[mcp]'",
    "schedulefree": "schedule-free AdamW: pip install 'finetuning-workbench[optim]'",
}
_MARKS = {"ok": ("✓", "green"), "note": ("?", "cyan"), "warning": ("!", "yellow"), "error": ("x", "red")}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: str
    """ok note warning error"""
    text: str


@click.command(short_help="What this machine can do.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(runs: str | None, as_json: bool) -> int:
    """Look at this machine: GPUs, packages, disk, file system, and what happens to a run at logout."""
    folder = Path(runs or os.environ.get("WORKBENCH_RUNS") or "runs").absolute()
    checks = [*run_checks(folder)]
    bad = any(check.state == "error" for check in checks)
    if as_json:
        print_json({"ok": not bad, "checks": [asdict(check) for check in checks]})
        return int(bad)
    for check in checks:
        mark, colour = _MARKS[check.state]
        echo(styled(mark, fg=colour), f" {check.name:<14}{check.text}")
    return int(bad)


def run_checks(folder: Path) -> Iterator[Check]:
    """Every check in the order shown."""
    yield from _machine(folder)
    yield from _packages()
    yield from _linear_attention(folder)
    yield from _runs_folder(folder)
    yield from _logout()
    yield from _terminal()
    yield from _network()


def _machine(folder: Path) -> Iterator[Check]:
    machine = hardware.this_machine(folder)
    memory = f", {size(machine.memory_bytes)} of memory" if machine.memory_bytes else ""
    yield Check("machine", "ok", f"{machine.cpu_count or '?'} CPU cores{memory}, Python {sys.version.split()[0]}")
    if not machine.gpus:
        yield Check("GPU", "note", "none; training runs on the CPU, which is enough for builtin/tiny and small models")
    for index, gpu in enumerate(machine.gpus):
        state = "ok" if gpu.capability >= (8, 0) else "note"
        half = "bfloat16" if gpu.capability >= (8, 0) else "float16 only, no bfloat16"
        capability = f"capability {gpu.capability[0]}.{gpu.capability[1]}"
        yield Check(f"GPU {index}", state, f"{visible(gpu.name)}, {size(gpu.memory_bytes)}, {capability}, {half}")
    yield from _between_gpus(len(machine.gpus))
    if machine.disk_free_bytes is not None:
        free = machine.disk_free_bytes
        yield Check("disk", "ok" if free > 5 * hardware.GiB else "warning", f"{size(free)} free for runs")


def _between_gpus(gpus: int) -> Iterator[Check]:
    """What joins the GPUs, and what NCCL is told by the environment."""
    from engine.run import network

    if gpus > 1 and (links := hardware.gpu_links()):
        pairs = ", ".join(f"{count} of {sum(links.values())} pairs over {words}" for words, count in links.items())
        slow = "" if set(links) == {"NVLink"} else "; fsdp2 sends every layer over it twice a step, ddp gradients once"
        yield Check("GPU links", "note" if slow else "ok", pairs + slow)
    if absent := network.absent_interface(os.environ, network.interfaces()):
        yield Check("NCCL", "error", absent)
    elif told := network.settings(os.environ):
        yield Check("NCCL", "note", f"the environment says {told}; runs take it over")


def _packages() -> Iterator[Check]:
    versions = {name: hardware.installed(name) for name in NEEDED}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        yield Check("packages", "error", f"{', '.join(missing)} missing: pip install finetuning-workbench again")
    yield Check("packages", "ok", ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    for name, use in OPTIONAL.items():
        version = hardware.installed(name)
        yield Check(
            "optional",
            "ok" if version else "note",
            f"{name} {version}" if version else f"{name} is not installed: {use}",
        )


def _linear_attention(folder: Path) -> Iterator[Check]:
    """Whether kernels that are installed would be left out on these cards."""
    from engine.hardware import installed, this_machine

    cards = [gpu.capability for gpu in this_machine(folder).gpus]
    if not cards or not installed(FLA):
        return
    if reason := unfit("qwen3_next", {name: installed(name) for name in ("triton", "tilelang")}, cards):
        yield Check("optional", "warning", f"{FLA} is left out: {reason}. {TILELANG_INSTALL}")


def _runs_folder(folder: Path) -> Iterator[Check]:
    shown = visible(redact(str(folder)))
    place = hardware.existing_folder(folder)
    if not os.access(place, os.W_OK | os.X_OK):
        yield Check("runs folder", "error", f"{shown} cannot be written: choose another with --runs or WORKBENCH_RUNS")
        return
    from engine.run.launch import locks_hold

    yield _tried("appending", lambda: _append_holds(place))
    yield _tried("locks", lambda: locks_hold(place))
    yield Check("runs folder", "ok", shown + ("" if folder.exists() else ", made at the first launch"))


def _tried(name: str, attempt: Callable[[], tuple[bool, str]]) -> Check:
    try:
        holds, text = attempt()
    except OSError as problem:
        return Check(name, "error", f"could not be tried in the runs folder: {problem.strerror or problem}")
    except WorkbenchError as problem:
        return Check(name, "error", problem.message)
    return Check(name, "ok" if holds else "warning", text)


def _append_holds(place: Path) -> tuple[bool, str]:
    """Two writers that append take turns in the file, as the event log needs."""
    import tempfile

    handle, name = tempfile.mkstemp(prefix=".probe-", dir=place)
    os.close(handle)
    try:
        first, second = (os.open(name, os.O_WRONLY | os.O_APPEND) for _ in range(2))
        try:
            for writer, line in ((first, b"1\n"), (second, b"2\n"), (first, b"3\n")):
                os.write(writer, line)
        finally:
            os.close(first)
            os.close(second)
        whole = Path(name).read_bytes() == b"1\n2\n3\n"
    finally:
        os.unlink(name)
    return (
        whole,
        "appended lines stay whole" if whole else "appended lines overwrite each other here; take a local disk",
    )


def _logout() -> Iterator[Check]:
    from engine.run.logout import kills_at_logout

    kills, text = kills_at_logout()
    yield Check("logout", "warning" if kills else "ok", text)


def _terminal() -> Iterator[Check]:
    inside = "tmux" if os.environ.get("TMUX") else "screen" if os.environ.get("STY") else ""
    if inside:
        yield Check("terminal", "ok", f"inside {inside}: the app itself survives a lost connection, too")
    elif shutil.which("tmux"):
        yield Check("terminal", "ok", "runs outlive the window; tmux is installed if the window shall, too")
    else:
        yield Check("terminal", "note", "runs outlive the window; no tmux here to keep the window itself")


def _network() -> Iterator[Check]:
    offline = [
        name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name, "0") not in ("", "0")
    ]
    if offline:
        yield Check("hub", "note", f"{' and '.join(offline)} is set: only models and data on this machine are used")
    else:
        home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
        place = os.environ.get("HF_HUB_CACHE") or home
        yield Check("hub", "ok", f"downloads are kept in {visible(redact(place))}")
