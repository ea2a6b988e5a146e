"""The server of `prestarted`: imports what workers import, and forks one for each call. It ends with the tests."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import importlib.metadata
import itertools
import json
import os
import random
import re
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parent))
import prestarted

LIBRARIES = """numpy pyarrow datasets tokenizers safetensors.torch torch torch.utils.data peft accelerate trl
transformers.trainer transformers.modeling_utils transformers.models.auto.modeling_auto transformers.models.llama.modeling_llama
transformers.tokenization_utils_fast transformers.models.qwen3.modeling_qwen3 trl.trainer.sft_trainer trl.trainer.dpo_trainer torch.distributed.run
torch.distributed.elastic.rendezvous.static_tcp_rendezvous"""
M_MMAP_THRESHOLD = -3
MADV_COLLAPSE = 25
HUGE = 1 << 21
MANY = 30
_FORKS = itertools.count()
HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
"""Where torchrun starts its ranks, by a name of its own for `subprocess.Popen`."""
OWN = """engine.trainers.sft engine.trainers.dpo engine.trainers.receipt engine.data.prepare engine.models.load
engine.features.load engine.features.sequence engine.rehearse engine.rules engine.inspector.questions engine.chat.models
engine.chat.answering engine.export.making engine.trainers.table engine.trainers.watching engine.trainers.auto_resolution
engine.models.adapters engine.models.vocabulary engine.data.compare engine.data.gather_facts engine.data.collate engine.run.launch
engine.features.layer_offloading.apply engine.features.tiled_mlp.apply engine.features.activation_offloading.apply
engine.features.attention_backend.apply engine.features.packed_experts.apply engine.features.tile_timing.apply
engine.features.bf16_full_eval.apply engine.features.fp8_base.apply engine.features.module_cache.apply
engine.features.gradient_checkpointing.apply engine.features.padding.apply engine.features.quantization_aware.apply
engine.features.router_load.apply engine.features.vision_attention.apply"""


def serve(place: Path) -> None:
    os.environ.pop("ZZ_ROOM")
    gc.disable()  # a fifth of what the imports take is looking for garbage in them
    try:
        _import()
    except BaseException:
        (place / "failed").touch()
        raise
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno())
    lines: dict[int, tuple[socket.socket, str | None]] = {}
    with (place / "spent").open("w") as spent, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(place / "calls"))
        door.listen(64)
        assert threading.active_count() == 1
        _look_for_what_to_settle()
        print(*[(each / "comm").read_text().strip() for each in Path("/proc/self/task").iterdir()], flush=True)
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)  # as in the tests' own processes
        gc.enable()
        importlib.invalidate_caches()  # in each child it would write into the pages of thousands of folders' finders
        known: dict[str, Any] = {"at_import": prestarted.at_import(dict(os.environ))}
        known["surroundings"] = prestarted.surroundings()
        known["modules"] = sorted({name.partition(".")[0] for name in sys.modules})
        (place / "known.new").write_text(json.dumps(known))
        (place / "known.new").rename(place / "known")
        while _held(place):
            ready, _, _ = select.select([door, wake], [], [], 2)
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
            _reap(lines, spent)
            if door in ready:
                line, _ = door.accept()
                _answer(line, lines)


@functools.cache
def _in_huge_pages() -> None:
    """Memory is put together into pages of 2 MiB, where the kernel does that: a fork copies one entry for each page, and its
    child's end takes as many away. It takes as long as it saves with some 30 forks."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, file, *name = line.split()
        if rights == "rw-p" and file == "0" and name in ([], ["[heap]"]):
            start, end = (int(each, 16) for each in place.split("-"))
            for page in range(-(-start // HUGE) * HUGE, end // HUGE * HUGE, HUGE):
                advise(page, HUGE, MADV_COLLAPSE)


def _held(place: Path) -> bool:
    """Whether the tests still run."""
    try:
        with (place.parent / "held").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _import() -> None:
    from engine.compat import import_warnings

    with import_warnings.dropped():
        for name in LIBRARIES.split():
            importlib.import_module(name)
    for name in OWN.split():
        importlib.import_module(name)
    _make_once()


def _make_once() -> None:
    """What each would make for itself before its first step, a third of what a run of one step takes. What is forced to a disk
    is looked at in processes that were not forked, and here no power fails."""
    from huggingface_hub import ModelCard, ModelCardData
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from engine import builtin
    from engine.builtin import dates, tiny
    from tests import caches

    get_checkpoint_conversion_mapping("qwen3")  # patterns for the weights of every architecture there is
    caches.share_what_libraries_read()
    caches.unpack_plainly()
    caches.seed_plainly()
    ModelCard.from_template(ModelCardData())
    dates.training_days()
    tiny._texts_digest()
    caches.share_rows()
    for split in ("train", "eval"):
        builtin.GENERATED["builtin/dates"].of({}, split, 42)
    os.fsync = os.fdatasync = lambda handle: None
    _end_at_once()


def _end_at_once() -> None:
    """At its end each process would take 281 operators out of torch's registry, half of what its fork, start and end take."""
    import torch
    from torch._dynamo.utils import dump_compile_times

    atexit.unregister(dump_compile_times)
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (alive := each.peek()) is not None and alive[1] is torch.library._del_library:
            each.atexit = False


def _reap(lines: dict[int, tuple[socket.socket, str | None]], spent: IO[str]) -> None:
    """Each is told its end; what it took of a processor, and for which test, is written for `tests/cpu_seconds.py`."""
    while lines:
        try:
            pid, status, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        line, test = lines.pop(pid)
        if test is not None:
            print(used.ru_utime + used.ru_stime, test, sep="\t", file=spent, flush=True)
        with line, contextlib.suppress(OSError):
            line.send(str(status).encode())


def _answer(line: socket.socket, lines: dict[int, tuple[socket.socket, str | None]]) -> None:
    try:
        asked, files, _, _ = socket.recv_fds(line, prestarted.LONGEST, 3)
    except OSError:
        asked, files = b"", []
    if not asked:
        line.close()
        return
    called = json.loads(asked)
    tests = prestarted.SIDE_BY_SIDE in called["argv"]  # a process of tests, which charges them itself
    if tests or next(_FORKS) == MANY:
        _in_huge_pages()
    if not (pid := os.fork()):
        code = 1
        try:
            code = _become(called, files, line)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    for each in files:
        os.close(each)
    lines[pid] = line, None if tests else called["environment"].get("PYTEST_CURRENT_TEST", "")


def _become(asked: dict[str, Any], files: list[int], line: socket.socket) -> int:
    """The process that was asked for; its exit code."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if asked["session"]:
        os.setsid()
    elif asked["group"] is not None:
        os.setpgid(0, asked["group"])
    for number, file in enumerate(files):
        os.dup2(file, number)
    own = os.dup2(line.fileno(), 3, inheritable=False)
    os.closerange(4, 1 << 20)
    os.chdir(asked["cwd"])
    for limit, (soft, hard) in zip(prestarted.LIMITS, asked["limits"], strict=True):
        resource.setrlimit(limit, (soft, hard))
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[:0] = prestarted.further(
        asked["environment"], prestarted.module_of(asked["argv"], asked["environment"]) or ""
    )
    _show(asked["environment"])
    os.write(own, str(os.getpid()).encode())
    os.close(own)
    line.detach()
    return _run(asked["argv"])


def _show(environment: dict[str, str]) -> None:
    """What the kernel shows as this process's environment. Nobody reads the old one any more."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    assert len(shown) <= end - start
    ctypes.memmove(start, shown + bytes(end - start - len(shown)), end - start)


def _run(argv: list[str]) -> int:
    for name, number in (("stdout", 1), ("stderr", 2)):
        errors = "strict" if number == 1 else "backslashreplace"
        setattr(sys, name, open(number, "w", encoding="utf-8", errors=errors, buffering=1, closefd=False))  # noqa: SIM115
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if "-u" in argv:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    _settle()
    sys.orig_argv = argv
    if "-c" in argv:
        return _ended(lambda: _execute(argv[argv.index("-c") :]))
    module = argv.index("-m") + 1
    sys.argv = argv[module:]
    for name in (argv[module], f"{argv[module]}.__main__"):
        if name in ("engine.worker", prestarted.TORCHRUN) or name.endswith("__main__"):
            sys.modules.pop(name, None)
    if argv[module] == prestarted.TORCHRUN:
        prestarted.install()
        importlib.import_module(HANDLER).Popen = subprocess.Popen
    return _ended(lambda: runpy.run_module(argv[module], run_name="__main__", alter_sys=True))


def _execute(words: list[str]) -> None:
    sys.argv = ["-c", *words[2:]]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(words[1], vars(main))


def _ended(program: Callable[[], object]) -> int:
    """The program's exit code, with all done that Python does at an end."""
    code = 0
    try:
        program()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _settle() -> None:
    """What libraries took from the environment when they were imported is this process's now; so is chance."""
    import numpy
    from huggingface_hub import constants

    if room := os.environ.get("MALLOC_MMAP_THRESHOLD_"):  # which the C library reads when a process starts
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, int(room))
    random.seed()
    numpy.random.seed()
    old = str(constants.HF_HOME)
    importlib.reload(constants)
    new = str(constants.HF_HOME)
    for module, name in SETTLED:
        value = vars(module)[name]
        if isinstance(value, str | Path):
            setattr(module, name, type(value)(new + str(value)[len(old) :]))
        else:
            setattr(module, name, vars(constants)[name])


def _look_for_what_to_settle() -> None:
    """Looked for once: each process would go through tens of thousands of names otherwise."""
    from huggingface_hub import constants

    home = str(constants.HF_HOME)
    for module in list(sys.modules.values()):
        if module is constants:
            continue  # which is read anew
        if isinstance(module, ModuleType) and re.match(r"(huggingface_hub|transformers|datasets)\b", module.__name__):
            for name, value in list(vars(module).items()):
                placed = isinstance(value, str | Path) and str(value).startswith(home)
                if placed or (isinstance(value, bool) and name in vars(constants)):
                    SETTLED.append((module, name))


SETTLED: list[tuple[ModuleType, str]] = []
"""Modules and names in them that hold what the environment said when they were imported."""


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
