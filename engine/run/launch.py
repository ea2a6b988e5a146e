"""Starting a run so that it outlives every window: preflight, a folder, and a detached supervisor.

The supervisor gets a session of its own, no terminal, and files instead of pipes; it starts the worker the same way.
`launch` makes a run, `resume` goes on in the same folder, `attend` brings a supervisor to a run that lost its own.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import figures
from engine.errors import RunBusy, UsageError, WorkbenchError, redact, visible
from engine.run import checkpoint, control, devices, inside, proposals, slurm, store
from engine.run.devices import Choice
from engine.run.events import last_numbers
from engine.run.lock import file_system, is_held, try_flock
from engine.run.nodes import rendezvous_of
from engine.run.process import host
from engine.run.spawn import python, safe_python
from engine.run.store import ENDED, RunFolder
from engine.run.warm import Wanted, WarmWorker

_PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "finetuning-workbench")
# Room for events, samples and log beside the checkpoints.
_SMALL_FILES = 64 << 20
_LEAVING_SECONDS = 20.0
_BEGUN = ("config", "rendezvous", "state", "cause", "message", "exit_code", "ended", "versions", "devices", "processes")


def launch(
    config_text: str,
    *,
    runs_dir: str | os.PathLike[str],
    name: str,
    devices: object = "auto",
    info: Mapping[str, Any] | None = None,
    queue: bool = False,
    after: RunFolder | None = None,
    warm: WarmWorker | None = None,
    without: tuple[str, ...] = (),
    job: slurm.Job | None = None,
) -> RunFolder:
    """Make a run from a complete config and start it, detached. Returns once its supervisor is at work.

    With `job` it is handed over to SLURM instead, an array by who made its runs; an `auto` that is left its node decides.

    A worker that waits at `warm` takes the run where it serves one that has no use for the packages `without`.

    With `queue` the supervisor waits until a device is free, with `after` first until that run has ended, however it did.

    `info` goes into run.json: `method`, `model`, `seed`, `grace_seconds`, and `forecast_bytes` (what checkpoints will
    take), which is held against the free disk. Raises WorkbenchError, with nothing left behind, if it cannot start.
    """
    details = dict(info or {})
    root = Path(runs_dir).absolute()
    _preflight(root, int(details.get("forecast_bytes") or 0))
    chosen = Choice((), 1) if job is not None else choose_free(devices, root)
    waits = _waits(job is not None, queue, after)
    run = store.create(
        root,
        config_text,
        {
            **details,
            **waits,
            "name": name,
            "versions": versions(),
            "config": config_text,
            "devices_wanted": devices,
            "devices": [] if waits else list(chosen.visible),
            "processes": chosen.processes,
        },
    )
    try:
        if job is not None:
            _submit(run, job, float(details.get("grace_seconds") or 0))
            return run
        node = None
        if warm is not None and not waits and chosen.processes == 1 and "rendezvous" not in details:
            node = warm.take(run, wanted(details, chosen, without))
        if node is None:
            _start_supervisor(run, "start")
        else:
            code, _, words = node.partition(" ")
            _require_started(run, int(code), words)
    except BaseException:
        if run.worker() is None:
            shutil.rmtree(run.path)
        raise
    return run


def _waits(job: bool, queue: bool, after: RunFolder | None) -> dict[str, Any]:
    """What run.json says of a run that waits: for a device, another run or a cluster; nothing of one that starts now."""
    if queue or after is not None:
        return {"state": "queued", "after": str(after.path) if after is not None else None}
    if job:
        message = "handed over to SLURM"
        return {"state": "queued", "cluster": slurm.NAME, "submitted": time.time(), "message": message}
    return {}


def _submit(run: RunFolder, job: slurm.Job, grace: float) -> None:
    """Hands the run over to SLURM, with a script in its folder; one of an array has it for a `resume`."""
    text = slurm.script(run.path, run.id, job.options, grace, rendezvous_of(run).nodes)
    inside.replace(run, run.path / slurm.SCRIPT, text)
    if not job.array:
        slurm.submit(run)


def resume(run: RunFolder, *, accept_data: bool = False) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Go on with a run that ended, from its newest whole checkpoint.

    Returns that checkpoint (None: from the beginning) and those that were skipped, each with the reason. Without
    `accept_data` the worker ends before its first step where the rows teach otherwise than those of before.
    Raises RunBusy if the run is alive, and WorkbenchError if it reached its end and its config was not changed since.
    """
    run.refuse_flaws()
    settle(run)
    if run.state == "queued":
        attend(run)
    if at_work(run):
        raise RunBusy(f"run {run.id} is still {run.state}.", f"`workbench watch {store.called(run)}` shows it.")
    if run.state == "finished" and not changed_settings(run):
        longer = proposals.longer(run).options
        way = f"`workbench resume {store.called(run)} {longer}` trains it longer."
        raise WorkbenchError(f"{run.id} is finished; there is nothing left to go on with.", way)
    attend(run)
    newest, skipped = checkpoint.to_go_on_from(run)
    wanted = _devices_wanted(run)
    job = slurm.is_job(run)
    chosen = Choice((), 1) if job else choose_free(wanted, run.path.parent)
    before = run.read_json()
    run.update_json(
        state="queued" if job else "starting",
        cause="",
        message="handed over to SLURM" if job else "",
        **({"submitted": time.time(), "requeued_in_vain": 0} if job else {}),
        exit_code=None,
        ended=None,
        versions=versions(),
        devices_wanted=wanted,
        devices=list(chosen.visible),
        processes=chosen.processes,
        accept_data=accept_data,
        rendezvous=_meets_again(run),
        config=run.read_config(),
        restarted_from=None,
        restarts_in_vain=0,
    )
    try:
        if job:
            for name in inside.names(run, run.control):
                control.remove(run, run.control / name)
            slurm.submit(run)
        else:
            _start_supervisor(run, "start")
    except WorkbenchError:
        if job or not at_work(run):
            # It did not begin: what its last end said stays true.
            run.update_json(**{key: before.get(key) for key in _BEGUN})
        raise
    return newest, skipped


def _meets_again(run: RunFolder) -> dict[str, Any] | None:
    """How the nodes of the run meet, as many as its config.yaml says now; None on one machine."""
    from engine.config.files import parse

    nodes = value_at(parse(run.read_config()).mapping, ("distributed", "nodes"))
    return replace(rendezvous_of(run), nodes=nodes).as_json() if isinstance(nodes, int) and nodes > 1 else None


def wanted(info: Mapping[str, Any], chosen: devices.Choice, without: tuple[str, ...]) -> Wanted:
    """What a run with this `info`, on one device, asks of its worker."""
    secret = tuple(info.get("secrets") or ())
    return Wanted(str(info.get("method") or ""), tuple(map(str, chosen.visible)), secret, without, versions())


def _devices_wanted(run: RunFolder) -> object:
    """Which devices the run is to have: those it was launched for, unless its config.yaml names others since."""
    from engine.config.files import parse

    known = run.read_json()
    now, then = (
        value_at(parse(text).mapping, ("run", "devices")) for text in (run.read_config(), known.get("config") or "")
    )
    return known.get("devices_wanted", "auto") if now == then or now is None else now


def settle(run: RunFolder) -> None:
    """Wait for the processes of a run that has said its last word: until they are gone its state is not the last one."""
    give_up = time.monotonic() + _LEAVING_SECONDS
    while run.state != "queued" and at_work(run) and _has_final_event(run) and time.monotonic() < give_up:
        time.sleep(0.05)


def changed_settings(run: RunFolder) -> list[str]:
    """What differs between the run's config.yaml and the one it last went on with, as `path: before -> now`."""
    from engine.config.edit import MISSING, changes
    from engine.config.files import parse

    before = run.read_json().get("config")
    now = run.read_config()
    if not isinstance(before, str) or before == now:
        return []
    old = parse(before).mapping
    changed = []
    for path, value in changes(old, parse(now, path=run.config).mapping):
        shown = "removed" if value is MISSING else repr(value)
        changed.append(f"{'.'.join(map(str, path))}: {value_at(old, path)!r} -> {shown}")
    return changed


def value_at(place: Any, path: tuple[Any, ...]) -> Any:
    """What stands there in a mapping; None where nothing does."""
    for part in path:
        try:
            place = place[part]
        except (KeyError, IndexError, TypeError):
            return None
    return place


def attend(run: RunFolder) -> str:
    """Bring a supervisor to a run that has none but should: it adopts a living worker, or states what became of it.

    Harmless to call on any run; returns the run's state.
    """
    if slurm.is_job(run):
        return slurm.refresh(run)
    if unattended(run):
        try:
            _start_supervisor(run, "attend")
        except RunBusy:
            # Another window brought one in this very moment.
            return run.state
    return run.state


def attend_or_report(run: RunFolder) -> str:
    """`attend` for who lists or watches: what keeps this run's state from being true, in a sentence; empty if nothing."""
    if reason := run.flaw():
        return reason
    try:
        if unattended(run) or slurm.is_job(run):
            attend(run)
    except (WorkbenchError, OSError) as problem:
        return str(problem)
    return ""


def unattended(run: RunFolder) -> bool:
    """Whether the run should have a supervisor and has none. One of another machine is that machine's to tell, and of a
    cluster's job its scheduler's."""
    values = run.read_json()
    if not values or values.get("cluster") or values.get("state") in ENDED or values.get("host") not in (None, host()):
        return False
    if "supervisor_pid" not in values and time.time() - float(values.get("created") or 0) < 60:
        return False  # being launched at this moment
    return not _attended(run)


def _attended(run: RunFolder) -> bool:
    """Whether its supervisor lives. One in another container of this machine is known by its lock on the folder, or that of the
    worker, whose supervisor is then that container's to bring."""
    supervisor = run.supervisor()
    if supervisor is None or not supervisor.beside:
        return supervisor is not None and supervisor.alive
    try:
        handle = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return try_flock(handle) == "busy" or is_held(run)
    finally:
        os.close(handle)


def attend_soon(run: RunFolder) -> subprocess.Popen[bytes]:
    """The same without waiting, for a window that must not stall; the caller polls what it gets."""
    job = [*python(), "-m", "engine.run.slurm", str(run.path)]
    return subprocess.Popen(
        job if slurm.is_job(run) else supervisor_argv(run, "attend"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={**os.environ, **safe_python(os.environ)},
        start_new_session=True,
    )


def supervisor_argv(run: RunFolder, do: str) -> list[str]:
    return [*python(), "-m", "engine.run.supervise", do, "--", str(run.path)]


def at_work(run: RunFolder) -> bool:
    """Whether a process works for this run, or watches over it; of a cluster's job, whether it has not ended."""
    if slurm.is_job(run):
        return slurm.refresh(run) not in ENDED
    return is_held(run) or (run.state not in ENDED and _alive(run))


def _has_final_event(run: RunFolder) -> bool:
    """Whether the run's final event is written: its processes are on their way out, which takes torch a second."""
    try:
        return last_numbers(run.events)[3]
    except OSError:
        return False


def _alive(run: RunFolder) -> bool:
    worker = run.worker()
    return (worker is not None and worker.alive) or _attended(run)


def devices_of_live(root: Path, *, leaving: bool = True) -> dict[str, list[str]]:
    """The devices of each run in `root` whose processes live and that waits for none, by the run's id; none of them is the CPU.
    Without `leaving` one that has said its last word is left out."""
    return {
        other.id: [str(name) for name in values.get("devices") or []]
        for other in store.runs_in(root)
        if (values := other.read_json()).get("state") not in (*ENDED, "queued")
        and _alive(other)
        and (leaving or not _has_final_event(other))
    }


def choose_free(wanted: object, root: Path) -> devices.Choice:
    """The devices for a run in `root` that is to start now, those of the runs there left out. Raises WorkbenchError."""
    return devices.choose(wanted, {name for names in devices_of_live(root).values() for name in names})


def _start_supervisor(run: RunFolder, do: str) -> None:
    """Start it and wait until it says that it is at work; what it says otherwise is the error."""
    environment = {**os.environ, **safe_python(os.environ)}
    try:
        started = subprocess.run(
            supervisor_argv(run, do),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environment,
            start_new_session=True,
            timeout=60,
        )
    except subprocess.TimeoutExpired as problem:
        raise WorkbenchError(f"run {run.id}: its supervisor did not start within 60 s.") from problem
    _require_started(run, started.returncode, started.stderr.decode(errors="replace"))


def _require_started(run: RunFolder, code: int, words: str) -> None:
    """Raises RunBusy or WorkbenchError where its supervisor says that it could not begin."""
    if code == 0:
        return
    message = visible(redact(words), lines=True).strip()
    last = message.splitlines()[-1] if message else f"exit code {code}"
    if code == 3:
        raise RunBusy(last)
    raise WorkbenchError(f"run {run.id} could not be started: {last}")


def _preflight(root: Path, forecast: int) -> None:
    """Try what the run will need before anything is made: writing, appending, room."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        _try_append(root)
        space = os.statvfs(root)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(
            f"{visible(redact(str(root)))}: must be a folder for runs; got a file.",
            "Choose another folder with --runs or the WORKBENCH_RUNS variable.",
        ) from None
    except OSError as problem:
        raise WorkbenchError(
            f"{visible(redact(str(root)))}: runs cannot be written here: {problem.strerror or problem}.",
            "Choose another folder with --runs or the WORKBENCH_RUNS variable.",
        ) from problem
    free = space.f_bavail * space.f_frsize
    beside = _SMALL_FILES + store.BALLAST_BYTES
    if free < forecast + beside:
        raise WorkbenchError(
            f"{visible(str(root))}: the disk has {figures.size(free)} free, and this run is expected to need "
            f"{figures.size(forecast + beside)}: {figures.size(forecast)} for checkpoints, {figures.size(beside)} "
            "beside them for curves, log and what saving needs to end well.",
            "Free some space, keep fewer checkpoints, or choose another folder with --runs.",
        )
    if space.f_files and space.f_favail < 200:
        raise WorkbenchError(f"{visible(str(root))}: the disk has no room for new files (its inodes are used up).")


def _try_append(root: Path) -> None:
    """Two appends through two descriptors must both be there."""
    probe = root / f".probe-{secrets.token_hex(6)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    first = os.open(probe, flags, 0o600)
    try:
        second = os.open(probe, flags, 0o600)
        try:
            os.write(first, b"1\n")
            os.write(second, b"2\n")
            os.write(first, b"3\n")
        finally:
            os.close(second)
        if probe.read_bytes() != b"1\n2\n3\n":
            raise WorkbenchError(f"{visible(str(root))}: appending to files does not work on this file system.")
    finally:
        os.close(first)
        probe.unlink()


def locks_hold(root: Path) -> tuple[bool, str]:
    """Whether kernel locks keep two processes apart in this folder, and in words why not. For `doctor`."""
    probe = root / f".probe-{secrets.token_hex(6)}"
    handle = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if try_flock(handle) == "unsupported":
            return False, "this file system has no locks; runs use a heartbeat instead"
        other = "import fcntl,sys;fcntl.flock(open(sys.argv[1],'r+'),fcntl.LOCK_EX|fcntl.LOCK_NB)"
        done = subprocess.run([sys.executable, "-I", "-S", "-c", other, str(probe)], capture_output=True, timeout=30)
        if done.returncode == 0:
            return False, "locks are granted twice on this file system; runs go by their owner's record instead"
        return True, f"locks hold ({file_system(root) or 'unknown file system'})"
    finally:
        os.close(handle)
        probe.unlink()


def versions() -> dict[str, str]:
    from importlib import metadata  # lists of runs ask this module for other things, and it brings a parser of mails

    installed_versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in _PACKAGES:
        try:
            installed_versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed_versions
