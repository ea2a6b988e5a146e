"""A SLURM on the loopback, with everything of its own: for tests, as root. `with cluster(folder) as environ: ...`"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def lacks() -> str:
    """Why there can be no cluster here; empty where there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"SLURM is not installed: {missing[0]} is missing" if missing else "needs root" if os.getuid() else ""


@contextmanager
def cluster(place: Path, nodes: int = 1) -> Iterator[dict[str, str]]:
    """Start munged, slurmctld and a slurmd for each of so many nodes of this machine, with their files in `place`; gives the
    variables that lead commands to them.

    Sockets lie in a folder of their own below /tmp: a path of 108 characters is too long for one. A step of SLURM ends on it
    without a word, and slurmd says "Resource temporarily unavailable".
    """
    place.mkdir(mode=0o755)
    key = place / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (place / "state").mkdir()
    names = [f"node{number}" for number in range(nodes)]
    environ = {"SLURM_CONF": str(place / "slurm.conf"), "PATH": _PATH}
    with ExitStack() as ends:
        sockets = Path(ends.enter_context(TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True)))
        sockets.chmod(0o755)
        for name in names:
            (sockets / f"spool-{name}").mkdir()
        (place / "slurm.conf").write_text(_config(place, sockets, names))
        munge = [f"--socket={sockets / 'munge'}"]
        munge += [f"--{name}={place / name}" for name in ("pid-file", "log-file", "seed-file")]
        for argv in (
            ["munged", "-F", "--force", f"--key-file={key}", *munge],
            ["slurmctld", "-D", "-c"],
            *(["slurmd", "-D", "-N", name] for name in names),
        ):
            log = ends.enter_context(
                open(place / f"{argv[0]}-{argv[-1]}.out" if "-N" in argv else place / f"{argv[0]}.out", "wb")
            )
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environ},
                start_new_session=True,
            )
            ends.callback(_end, process)
            if argv[0] == "munged":
                _until(lambda: (sockets / "munge").exists(), process, place)
        _until(lambda: _states(environ) == nodes * ["idle"], process, place)
        try:
            yield environ
        finally:
            subprocess.run(["scancel", "--me"], env={**os.environ, **environ}, timeout=60)


def _config(place: Path, sockets: Path, names: Sequence[str]) -> str:
    controller, host = _free_port(), socket.gethostname()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={_free_port()} CPUs=1 State=UNKNOWN"
        for name in names
    )
    return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={sockets}/munge
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={sockets}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
KillWait=20
ReturnToService=2
PlugStackConfig=/dev/null
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _states(environ: dict[str, str]) -> list[str]:
    """The state of each node."""
    said = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%t"], env={**os.environ, **environ}, capture_output=True, text=True, timeout=60
    )
    return said.stdout.split()


def _until(hold: object, process: subprocess.Popen[bytes], place: Path) -> None:
    end = time.monotonic() + 60
    assert callable(hold)
    while not hold():
        logs = "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in place.glob("*.out"))
        assert process.poll() is None, logs
        assert time.monotonic() < end, logs
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
