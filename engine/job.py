"""A run's supervisor as a job of SLURM, in the foreground of its script: `python -P -m engine.job -- FOLDER [JOB]`.

On the first node that the run gets it chooses what the config leaves to the machine (`auto`). SLURM's USR1 before the time
limit, and its SIGTERM where it preempts, save a checkpoint and stop the worker; then the job is queued again, and goes on
from the newest whole checkpoint. A run that finished, failed or was stopped by a person is not. No torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from engine.config.files import dump, parse
from engine.data.gather_facts import gather_facts
from engine.errors import Cancelled, WorkbenchError
from engine.planning.auto import resolved
from engine.rules import read
from engine.run import cause, checkpoint, control, inside, launch, member, slurm
from engine.run.detached import hold_on
from engine.run.from_config import of_machine
from engine.run.lock import STALE_SECONDS, is_held
from engine.run.nodes import from_slurm, rendezvous_of
from engine.run.process import signal_name
from engine.run.store import ENDED, RunFolder
from engine.run.supervise import Supervisor, claim

PATIENCE_SECONDS = 1.5 * STALE_SECONDS
"""The node that the job had before may have left its heartbeat behind."""
MOST_IN_VAIN = 3
"""How often in a row a time limit may come before there is a new checkpoint."""


class JobSupervisor(Supervisor):
    """Stays with the worker as its base does, and with a signal of SLURM's leaves the run to be queued again."""

    def __init__(self, run: RunFolder, job: str) -> None:
        super().__init__(run)
        self.job = job
        self.told = ""
        self.asked = ""
        self.goes_on = False

    @property
    def by(self) -> str:
        """Who asks the worker to stop."""
        return f"SLURM ({self.told})"

    def begin(self) -> None:
        """Start the worker on this node's devices. Raises WorkbenchError where the run cannot work here."""
        choose_here(self.run)
        values = self.run.read_json()
        chosen = launch.choose_free(values.get("devices_wanted", "auto"), self.run.path.parent)
        self.state.write(
            state="starting",
            message="",
            versions=launch.versions(),
            devices=list(chosen.visible),
            processes=chosen.processes,
        )
        self.start(waited=True)

    def on_signal(self, number: int, _: object) -> None:
        """A signal of SLURM's. The worker is asked in writing: a signal may have reached it too, and a second would end it."""
        self.told = self.told or signal_name(number)
        self.forwarded = True  # no start anew within this job

    _forward = on_signal

    def _watch_requests(self) -> None:
        if self.told and not self.asked and self.final is None:
            with contextlib.suppress(WorkbenchError):  # a folder that is away for a moment is asked at the next look
                self.asked = control.request(self.run, "save_stop", by=self.by, hurried=True)
        super()._watch_requests()

    def _close(self, code: int | None) -> None:
        assert self.final is not None
        stopped = self.final["kind"] == "stopped" and self.final.get("by") in (self.by, "SIGTERM")
        # A worker of several processes ends by SIGTERM at once.
        ended = self.final["kind"] == "failed" and cause.passes(self.final)
        self.goes_on = bool(self.told) and (stopped or ended)
        if self.goes_on and self.told == "SIGUSR1" and self._vain() >= MOST_IN_VAIN:
            self.goes_on = False
            message = (
                f"Its time limit came {MOST_IN_VAIN} times in a row before there was a new checkpoint: ask for more"
            )
            self.final = {"kind": "stopped", "message": message}
        if not self.goes_on:
            super()._close(code)
            return
        if self.asked:
            control.remove(self.run, self.run.control / f"{self.asked}.json")
        self.run.free_ballast()
        self.state.update(state="queued", cause="", exit_code=code, ended=None, message=self._signal_name())

    def _vain(self) -> int:
        """How often in a row the run was queued again without a new checkpoint, this time included; kept in run.json."""
        newest, _ = checkpoint.newest_valid(self.run, hashes=False)
        step = (checkpoint.step_of(newest) if newest is not None else None) or 0
        values = self.run.read_json()
        before, vain = values.get("requeued_from") or 0, values.get("requeued_in_vain") or 0
        vain = vain + 1 if step <= before else 0
        self.state.update(requeued_from=step, requeued_in_vain=vain)
        return int(vain)

    def fail_to_begin(self, problem: Exception) -> None:
        """As its base does; a run whose nodes had not all come when SLURM told it to end has not been stopped by anybody."""
        if not (isinstance(problem, Cancelled) and self.told) or control.asks_to_end(self.run):
            super().fail_to_begin(problem)
            return
        self.goes_on = True
        self.run.free_ballast()
        self.state.update(state="queued", cause="", message=self._signal_name())

    def _signal_name(self) -> str:
        why = "is near its time limit" if self.told == "SIGUSR1" else "was told to end"
        return f"requeued: job {self.job} {why}; the run goes on when the job begins again"

    def leave(self) -> None:
        """Have the job queued again where the run goes on; the last act, as SLURM ends the job for that.

        A job that SLURM itself ends (preempted, cancelled, its time over) is not asked for: it is queued again or not.
        """
        if not self.goes_on:
            return
        states = slurm.jobs(fresh=True)
        if self.told != "SIGUSR1" and (states is None or states.get(self.job, ("", ""))[0] != "RUNNING"):
            return
        if refused := slurm.requeue(self.job):
            self.goes_on = False
            self.final = {"kind": "stopped", "message": f"Job {self.job} was not queued again: {refused}"}
            super()._close(None)


def choose_here(run: RunFolder) -> None:
    """Write into the config what each `auto` becomes on this machine, once. Raises WorkbenchError where the rules refuse it."""
    if "auto" in run.read_json():
        return
    mapping = parse(run.read_config(), path=run.config).mapping
    facts = gather_facts(read(mapping).config, run.path)
    config = read(mapping, facts).accepted("This node cannot run it:")
    text = dump(resolved(config, facts))
    inside.replace(run, run.config, text)
    run.update_json(config=text, **of_machine(config, facts))


def take_part(run: RunFolder, rank: int) -> int:
    """Another node's part in the job, whose signals are the first node's to answer; its exit code."""
    hold_on()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return member.main(str(rank), str(run.path))


def main(path: str, job: str) -> int:
    """The whole job on this node; its exit code."""
    run = RunFolder(path)
    step = from_slurm(os.environ)
    if step is not None and step[0] > 0 and rendezvous_of(run).nodes > 1:
        return take_part(run, step[0])
    if run.state in ENDED or not run.path.is_dir():
        print(f"run {run.id} is {run.state}; there is nothing to do.", file=sys.stderr)
        return 0
    hold_on()
    supervisor = JobSupervisor(run, job)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, supervisor.on_signal)
    try:
        run.refuse_flaws()
        handle = claim(run, patience=PATIENCE_SECONDS)
        give_up = time.monotonic() + PATIENCE_SECONDS
        while is_held(run) and time.monotonic() < give_up:
            time.sleep(1.0)
        slurm.note(run, job)
        supervisor.begin()
    except (WorkbenchError, OSError, subprocess.SubprocessError) as problem:
        print(problem, file=sys.stderr)
        supervisor.fail_to_begin(problem)
        supervisor.leave()
        return 0 if run.state == "queued" else 1
    supervisor.stay()
    supervisor.leave()
    os.close(handle)
    return 0 if run.state != "failed" else 1


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[1] != "--" or not os.environ.get("SLURM_JOB_ID"):
        sys.exit("usage: python -P -m engine.job -- FOLDER [JOB], in a job of SLURM; JOB: ARRAY_TASK of an array")
    # A job that was submitted within a task of an array may see that one's SLURM_ARRAY_JOB_ID: the script says it.
    sys.exit(main(sys.argv[2], sys.argv[3] if len(sys.argv) == 4 else os.environ["SLURM_JOB_ID"]))
