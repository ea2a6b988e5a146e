"""A run as a job of SLURM: its script, submitting it, and what the scheduler says of it. Standard library only.

Such a run has `cluster: slurm` in run.json; its job's number stands in job.json, which who submits it writes. Its supervisor
is the job itself (`engine.job`), mostly on another host: pids and kernel locks say nothing here, so whoever looks at the run
asks `squeue` and writes down the end of a job that could not do so itself. `python -P -m engine.run.slurm FOLDER` does that.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UsageError, WorkbenchError, redact, visible
from engine.run import inside
from engine.run.events import last_numbers
from engine.run.spawn import python, safe_python
from engine.run.store import ENDED, RunFolder

NAME = "slurm"
SCRIPT = "job.sbatch"
ARRAY_SCRIPT = "array.sbatch"
"""The script of an array, in the folder of its first run."""
LOG = "slurm.log"
LOOK_SECONDS = 5.0
"""How long what `squeue` said is taken to hold; schedulers serve many and are not asked more often."""
SUBMIT_SECONDS = 120.0
LEAD_SECONDS = 120
"""The least time between SLURM's signal and the job's time limit: in it the run saves."""
_NUMBER = "job.json"
_MOST = 4096
_LINE = 1 << 16
_OURS = (
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "signal",
    "output",
    "open-mode",
    "job-name",
    "requeue",
    "no-requeue",
    "array",
    "wrap",
    "parsable",
)
_SHORT = {"N": "nodes", "n": "ntasks", "o": "output", "J": "job-name", "a": "array"}
_ENDS = {
    "CANCELLED": ("stopped", "was cancelled in the cluster"),
    "TIMEOUT": ("stopped", "reached its time limit"),
    "DEADLINE": ("stopped", "reached its deadline"),
    "PREEMPTED": ("stopped", "was preempted, and SLURM did not queue it again"),
    "OUT_OF_MEMORY": ("failed", "was ended because it used more memory than it had asked for (`--mem`)"),
    "NODE_FAIL": ("lost", "lost its node, and SLURM did not queue it again"),
    "BOOT_FAIL": ("lost", "got a node that did not start"),
}  # fmt: skip
"""What a job's state means for a run whose supervisor could not say so."""
_GOING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
"""States of a job that waits for its start."""


@dataclass(frozen=True)
class Job:
    """How a run is handed over: `options` are lines for sbatch, as `--time=1:00:00`; one of an `array` is submitted with others."""

    options: tuple[str, ...] = ()
    array: bool = False


# -- the script --------------------------------------------------------------------------------------------------------


def require_options(options: Sequence[str]) -> None:
    """Raises UsageError for what is no option of `sbatch`, or one that the script itself sets."""
    for option in options:
        if not option.startswith("-") or option.strip("- ") == "" or not option.isprintable():
            raise UsageError(
                f"--sbatch: must be one option of sbatch; got {visible(option)!r}.", "Write it as --sbatch=--exclusive."
            )
        name = option.lstrip("-").partition("=")[0].split()[0]
        name = name if option.startswith("--") else _SHORT.get(name[:1], name)
        if name == "array":
            raise UsageError(
                "--sbatch: --array is set by the script itself, for several configs or a sweep; leave it out.",
                "--array-limit says how many of its runs work at a time.",
            )
        if name in _OURS:
            raise UsageError(f"--sbatch: --{name} is set by the script itself; leave it out.")


def script(folder: Path, name: str, options: Sequence[str], grace_seconds: float, nodes: int = 1) -> str:
    """The text of the sbatch script for the run of this folder. `options` are lines for sbatch, as `--time=1:00:00`.

    On several nodes `srun` starts one agent on each; it hands the signals on that the script gets.
    """
    log = str(folder / LOG).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    ours = [f'--output="{log}"', "--open-mode=append"]
    return _script(name, ours, options, grace_seconds, nodes, shlex.quote(str(folder)))


def array_script(
    tasks: Sequence[tuple[Path, str]],
    name: str,
    job: Job,
    grace_seconds: float,
    nodes: int = 1,
    limit: int | None = None,
) -> str:
    """The text of the sbatch script for an array of runs: the folder of each, and in a few words which it is.

    At most `limit` of them work at a time; without it as many as SLURM has room for.
    """
    throttle = f"%{limit}" if limit is not None else ""
    # `--output` knows no list of names: each task opens the log of its run.
    ours = [f"--array=0-{len(tasks) - 1}{throttle}", "--output=/dev/null"]
    choice = [
        "",
        "# Each task of the array is one run: its number is the place of the run's folder in this list.",
        "runs=(",
        *(
            f"  {shlex.quote(str(folder))}  # {number}: {visible(words)}"
            for number, (folder, words) in enumerate(tasks)
        ),
        ")",
        'run="${runs[SLURM_ARRAY_TASK_ID]}"',
        f'exec >>"$run/{LOG}" 2>&1',
    ]
    words = '"$run" "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'
    return _script(name, ours, job.options, grace_seconds, nodes, words, choice)


def _script(
    name: str,
    ours: Sequence[str],
    options: Sequence[str],
    grace_seconds: float,
    nodes: int,
    words: str,
    choice: Sequence[str] = (),
) -> str:
    """A script with these options, the lines that choose a run, and the words with which its supervisor is called."""
    lead = max(LEAD_SECONDS, round(2 * grace_seconds))
    options = [
        f"--job-name={name}",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        *(["--ntasks-per-node=1"] if nodes > 1 else []),
        *ours,
        "--requeue",
        f"--signal=B:USR1@{lead}",
        *options,
    ]
    agents = ["srun", "--kill-on-bad-exit=0"] if nodes > 1 else []
    kept = {key: value for key, value in safe_python(os.environ).items() if value}
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        *choice,
        "",
        f"# {lead} s before the time limit SLURM sends USR1: the run saves a checkpoint and its job is queued again.",
        "# It then goes on from the newest whole checkpoint. What follows is the run's supervisor.",
        *(f"export {key}={shlex.quote(value)}" for key, value in kept.items()),
        f"exec {shlex.join([*agents, *python(), '-m', 'engine.job', '--'])} {words}",
    ]
    return "\n".join(lines) + "\n"


# -- its job -----------------------------------------------------------------------------------------------------------


def is_job(run: RunFolder) -> bool:
    """Whether the run is the cluster's: its supervisor is a job, and nothing on this host is started for it."""
    return run.read_json().get("cluster") == NAME


def number(run: RunFolder) -> str:
    """The number of the run's job; empty where it has none, as in a copy of its folder."""
    try:
        document = json.loads(inside.read(run, _NUMBER, _MOST))
        # A network file system has another device number on each host; the inode is the same.
        return str(document["job"]) if document["folder"] == inside.identity(run)[1] else ""
    except (OSError, ValueError, TypeError, KeyError, RecursionError, WorkbenchError):
        return ""


def note(run: RunFolder, job: str) -> None:
    """Keep the number of the run's job."""
    inside.replace(run, run.path / _NUMBER, json.dumps({"job": job, "folder": inside.identity(run)[1]}))


_NO_CLUSTER = ("could not establish a configuration source", "unable to process configuration", "slurm.conf")
_NO_CONTROLLER = ("unable to contact slurm controller", "slurm backup controller in standby", "connect failure")
"""By what `sbatch` says, which jobs were not refused but could not be handed over."""


def require_scheduler() -> None:
    """Raises WorkbenchError where no `sbatch` is here to take a job."""
    if shutil.which("sbatch") is None:
        raise WorkbenchError("sbatch was not found.", "Submit from a machine of the cluster, or look with --dry-run.")


def submit(run: RunFolder) -> str:
    """Hand the run's script to `sbatch`; the job's number. Raises WorkbenchError with the words of sbatch."""
    note(run, "")
    job = _hand_over(run.path / SCRIPT)
    note(run, job)
    return job


def submit_array(runs: Sequence[RunFolder], text: str) -> str:
    """Hand the script of an array over, whose tasks are these runs; the array's number. Each run's job is `NUMBER_PLACE`.

    Raises WorkbenchError with the words of sbatch.
    """
    for run in runs:
        note(run, "")
        run.update_json(submitted=time.time())  # making them all may have taken long
    place = runs[0].path / ARRAY_SCRIPT
    inside.replace(runs[0], place, text)
    job = _hand_over(place)
    try:
        for number, run in enumerate(runs):
            note(run, f"{job}_{number}")
    except BaseException:
        _ask("scancel", job)
        raise
    return job


def _hand_over(place: Path) -> str:
    done = _ask("sbatch", "--parsable", str(place))
    if done is None:
        raise WorkbenchError("sbatch was not found or does not answer.", "Submit from a machine of the cluster.")
    job = done.stdout.strip().partition(";")[0]
    said = f"{done.stderr} {done.stdout}".lower()
    if done.returncode and any(words in said for words in _NO_CLUSTER):
        raise WorkbenchError(
            "this machine belongs to no SLURM cluster: sbatch is here and finds no configuration of one.",
            "Submit from a machine of the cluster, look at the script with --dry-run, or train here with `workbench train`.",
        )
    if done.returncode and any(words in said for words in _NO_CONTROLLER):
        raise WorkbenchError(
            "the controller of this SLURM cluster does not answer.", "Submit again once `sinfo` shows its partitions."
        )
    if done.returncode or not job.isdigit():
        raise WorkbenchError(
            f"sbatch refused the job: {_output(done)}", "Change what was asked for, and submit it again."
        )
    return job


def requeue(job: str) -> str:
    """Have SLURM queue this job again, which ends it; the words of `scontrol` where it does not."""
    done = _ask("scontrol", "requeue", job)
    return "scontrol does not answer" if done is None else _output(done) if done.returncode else ""


def cancel_waiting(run: RunFolder, by: str) -> bool:
    """Take the run's job out of the cluster's queue; False where it does not wait there any more, or scancel is not here.

    Raises WorkbenchError with the words of scancel where it refuses.
    """
    job = number(run)
    if not job:
        return False
    only = ["--state=PENDING"]
    if "_" in job:
        # SLURM holds the waiting tasks of an array as one job: with a state to look for, scancel ends all of them.
        if (jobs(fresh=True) or {}).get(job, ("", ""))[0] not in _GOING:
            return False
        only = []
    done = _ask("scancel", *only, job)
    if done is None:
        return False
    if done.returncode:
        raise WorkbenchError(f"run {run.id}: scancel refused: {_output(done)}")
    states = jobs(fresh=True)
    if states is None or states.get(job, ("CANCELLED", ""))[0].split()[0] != "CANCELLED":
        return False
    run.update_json(state="stopped", message=f"Job {job} was cancelled by {by} while it waited", ended=time.time())
    return True


# -- what the scheduler says -------------------------------------------------------------------------------------------

_said: tuple[float, dict[str, tuple[str, str]] | None] = (-1e9, None)


def jobs(*, fresh: bool = False) -> dict[str, tuple[str, str]] | None:
    """The state of each of the user's jobs and why it waits, by number, of an array by `NUMBER_PLACE`; None where no scheduler
    answers.

    SLURM forgets a job a few minutes after its end.
    """
    global _said
    if fresh or time.monotonic() - _said[0] > LOOK_SECONDS:
        mine = f"--user={os.getuid()}"
        done = _ask("squeue", mine, "--array", "--noheader", "--states=all", "--format=%i|%T|%r", seconds=20)
        known = None
        if done is not None and not done.returncode:
            rows = (line.strip().split("|", 2) for line in done.stdout.splitlines())
            known = {row[0]: (row[1], row[2]) for row in rows if len(row) == 3}
        _said = time.monotonic(), known
    return _said[1]


def refresh(run: RunFolder) -> str:
    """Write down what became of the run's job where it could not say so itself; the run's state."""
    if _changed_states(run, jobs()):
        states = jobs(fresh=True)
        changes = _changed_states(run, states)
        if changes:
            run.update_json(**changes)
    return run.state


def _changed_states(run: RunFolder, states: dict[str, tuple[str, str]] | None) -> dict[str, Any]:
    """What run.json should say by these states of jobs, which were asked for before it is read here."""
    values = run.read_json()
    if not values or values.get("state") in ENDED:
        return {}
    job = number(run)
    if not job:
        if time.time() - float(values.get("submitted") or 0) < SUBMIT_SECONDS:
            return {}
        return _ended("lost", "It was not handed over to SLURM, or this folder is a copy of another run's.")
    if states is None:
        return {}
    state, reason = states.get(job, ("", ""))
    if not state and "_" in job and not _began(run, values):
        # Of an array's waiting tasks squeue forgets at once those that are cancelled.
        return _ended(
            "stopped",
            f"Job {job} left the cluster's queue before the run began: it was cancelled, or its node did not find this folder.",
        )
    state = state.split()[0] if state else ""
    if state in _GOING:
        again = "segment" in values
        why = f" ({visible(reason)})" if reason not in ("", "None") else ""
        message = f"{'requeued: ' if again else ''}job {job} waits in the cluster{why}"
        same = values.get("state") == "queued" and values.get("message") == message
        return {} if same else {"state": "queued", "cause": "", "message": message}
    if state in _ENDS:
        end, words = _ENDS[state]
        return _ended(end, f"Job {job} {words}{'' if end == 'stopped' else '.'}")
    if state and state not in ("COMPLETED", "FAILED"):
        return {}
    kind = _last_word(run) if values.get("state") != "queued" else ""
    if kind:
        return _ended(kind, "")
    if "segment" not in values:
        return _ended("failed", f"Job {job} ended before the run began.{_log(run)}")
    if values.get("state") == "queued":
        return _ended("stopped", f"Job {job} ended and is not queued again")
    return _ended("lost", f"Job {job} ended without a final word of the run.{_log(run)}")


def _began(run: RunFolder, values: dict[str, Any]) -> bool:
    """Whether the run's task of an array ever had a node: its script opens the log first."""
    return "segment" in values or os.path.lexists(run.path / LOG)


def _ended(state: str, message: str) -> dict[str, Any]:
    return {"state": state, "cause": state if state == "lost" else "", "message": message, "ended": time.time()}


def _last_word(run: RunFolder) -> str:
    """The kind of the final event, where one ends the events."""
    try:
        _, _, whole, final = last_numbers(run.events)
        if not final:
            return ""
        handle = inside.open_file(run, run.events)
        try:
            end = os.pread(handle, min(whole, _LINE), max(0, whole - _LINE))
        finally:
            os.close(handle)
        return str(json.loads(end.rstrip(b"\n").rpartition(b"\n")[2])["kind"])
    except (OSError, ValueError, KeyError, WorkbenchError):
        return ""


def _log(run: RunFolder) -> str:
    """The last line of what the job itself printed."""
    try:
        lines = inside.read(run, LOG, 1 << 16).decode(errors="replace").strip().splitlines()
    except (OSError, WorkbenchError):
        return ""
    return f" {LOG} ends with: {visible(redact(lines[-1]))[:300]}" if lines else ""


def _output(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
    return visible(redact(lines[-1]))[:500] if lines else f"exit code {done.returncode}"


def _ask(*argv: str, seconds: float = 60) -> subprocess.CompletedProcess[str] | None:
    """What a command of SLURM says; None where it is not here, or does not answer in time."""
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


if __name__ == "__main__":
    refresh(RunFolder(sys.argv[1]))
