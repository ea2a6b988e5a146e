"""The machines (nodes) of one run: how they meet, and hear of each other while they work. Imports no torch.

The run folder lies where all of them see it. Each writes `nodes/<rank>.json` alone, once a second: who it is, what it has, how
far it is. A node is gone once its file has stood still for `SILENT_SECONDS` of the reader's own clock, so that clocks may
differ and locks need not hold; what happens to its processes is its own affair, and no other node signals them.

The first node (rank 0) owns the run. It opens a round at each start, waits for the others' answers to it, refuses what does
not fit, and says go; then each starts torchrun with the round's address. Any node's end ends the round on all.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UsageError, WorkbenchError, visible
from engine.run import inside
from engine.run.cause import Cause
from engine.run.inside import UnsafeRunFile
from engine.run.network import refuse_absent
from engine.run.process import Identity, host, identity, identity_from
from engine.run.store import RunFolder

FOLDER = "nodes"
DEFAULT_PORT = 29500
"""Of a rendezvous, where none is given: torchrun's own."""
MEET_SECONDS = 600.0
BEAT_SECONDS = 1.0
SILENT_SECONDS = 15.0
REACH_SECONDS = 60
"""How long torchrun of one node tries to reach the address of the first, once all have come."""
FOLLOW_SECONDS = 3.0
"""How long the own processes have to end by themselves, and to say why, after another node's did."""
_MOST = 1 << 16
_ELSEWHERE = "192.0.2.1"
"""An address of documentation (RFC 5737), to which the way out leads."""


@dataclass(frozen=True)
class Rendezvous:
    """Where and under which name so many nodes meet. `endpoint` is host:port; empty: the first node chooses."""

    nodes: int
    endpoint: str = ""
    id: str = "none"
    seconds: float = MEET_SECONDS

    def as_json(self) -> dict[str, Any]:
        return {"nodes": self.nodes, "endpoint": self.endpoint, "id": self.id, "seconds": self.seconds}


def rendezvous_of(run: RunFolder) -> Rendezvous:
    """How the nodes of this run meet, by its run.json; of one node alone where it says nothing."""
    rendezvous = run.read_json().get("rendezvous") or {}
    try:
        return Rendezvous(
            int(rendezvous["nodes"]), str(rendezvous["endpoint"]), str(rendezvous["id"]), float(rendezvous["seconds"])
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        return Rendezvous(1)


def endpoint_of(text: str) -> str:
    """host:port of what a person gave as an address. Raises UsageError."""
    name, colon, port = text.rpartition(":") if text.count(":") == 1 or "]" in text else (text, "", "")
    if not colon:
        name, port = text, str(DEFAULT_PORT)
    if not name or not name.isprintable() or " " in name or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--rdzv-endpoint: must be HOST or HOST:PORT, the port from 1 to 65535; got {visible(text)!r}."
        )
    return f"{name}:{port}"


def split(endpoint: str) -> tuple[str, int]:
    name, _, port = endpoint.rpartition(":")
    return name.strip("[]"), int(port)


def listening(endpoint: str) -> str:
    """The address at which the first node will listen, tried; a free port of this host where none is given.

    Raises WorkbenchError where it is no address of this machine, or another program has it.
    """
    name, port = split(endpoint) if endpoint else (host(), 0)
    try:
        family, kind, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            return endpoint or f"{name}:{trial.getsockname()[1]}"
    except OSError as problem:
        raise WorkbenchError(
            f"--rdzv-endpoint: the first node cannot listen at {visible(name)}:{port}: {problem.strerror or problem}.",
            "Give a name or address of the machine with --node-rank 0, and a free port.",
        ) from problem


def require_place(rendezvous: Rendezvous, rank: int, base: Mapping[str, str]) -> None:
    """Raises WorkbenchError where this machine cannot take its place: it lacks an interface that a variable names, or cannot
    listen, as the first, at the address."""
    refuse_absent(base)
    if rank == 0 and rendezvous.endpoint:
        listening(rendezvous.endpoint)


def interface(endpoint: str, *, elsewhere: bool = False) -> str:
    """The network interface by which this machine reaches the address; empty where that is not known. Many a machine calls
    itself 127.0.1.1: with other nodes `elsewhere` it is the one that leads out of it."""
    import psutil

    name, port = split(endpoint)
    try:
        own = _source(name, port)
        if elsewhere and ipaddress.ip_address(own).is_loopback:
            own = _source(_ELSEWHERE, port)
    except OSError:
        return ""
    known = psutil.net_if_addrs().items()
    return next((each for each, addresses in known if any(other.address == own for other in addresses)), "")


def _source(name: str, port: int) -> str:
    """This machine's own address on the way to another."""
    family, kind, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as trial:
        trial.connect(address)  # sends nothing: it asks for the route
        return str(trial.getsockname()[0])


def read_node(run: RunFolder, rank: int) -> dict[str, Any]:
    """What the file of a node says now; empty where it says nothing."""
    return inside.read_json(run, f"{FOLDER}/{rank}.json", _MOST)


def hosts(run: RunFolder, nodes: int) -> list[str]:
    """The names of the machines that the nodes are on, in the order of their ranks."""
    return [visible(str(read_node(run, rank).get("host") or "unknown")) for rank in range(nodes)]


class Node:
    """This machine's word to the other nodes of a run, and theirs."""

    def __init__(self, run: RunFolder, rank: int, nodes: int) -> None:
        self.run = run
        self.rank = rank
        self.nodes = nodes
        me = identity()
        assert me is not None
        self.said: dict[str, Any] = {"rank": rank, **me.as_json(), "beat": 0}
        self._next = 0.0
        self._heard: dict[int, tuple[dict[str, Any], float, int]] = {}
        inside.make_folder(run, FOLDER, exist_ok=True)

    def report(self, **changes: Any) -> None:
        """Tell the others. Raises OSError where it cannot be written."""
        self.said |= {**changes, "beat": self.said["beat"] + 1}
        inside.replace(self.run, f"{FOLDER}/{self.rank}.json", json.dumps(self.said) + "\n")
        self._next = time.monotonic() + BEAT_SECONDS

    def beat(self) -> None:
        """Show that this node lives; a disk that is away for a moment is tried again."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + BEAT_SECONDS
            try:
                self.report()
            except (OSError, UnsafeRunFile):
                # The others wait SILENT_SECONDS before they count on it.
                return

    def read_rank(self, rank: int) -> dict[str, Any]:
        """What a node says, and notes when it last said something new."""
        found = read_node(self.run, rank)
        before = self._heard.get(rank)
        if before is None:
            self._heard[rank] = (found, time.monotonic(), 0)
        elif found and found != before[0]:
            self._heard[rank] = (found, time.monotonic(), before[2] + 1)
        return self._heard[rank][0]

    def lives(self, rank: int) -> bool:
        """Whether a node was heard to speak, not only found to have spoken, and not too long ago."""
        return rank in self._heard and self._heard[rank][2] > 0 and not self.is_silent(rank)

    def is_silent(self, rank: int, patience: float | None = None) -> bool:
        """Whether a node has said nothing new for so many seconds, `SILENT_SECONDS` where none are given."""
        seconds = SILENT_SECONDS if patience is None else patience
        return rank in self._heard and time.monotonic() - self._heard[rank][1] > seconds

    def name(self, rank: int) -> str:
        """`node 1 (its host)`."""
        return f"node {rank} ({visible(str((self.read_rank(rank) or {}).get('host') or 'unknown host'))})"

    @property
    def rival(self) -> Identity | None:
        """Another process that speaks as this node."""
        identity = identity_from(read_node(self.run, self.rank))
        mine = identity_from(self.said)
        return identity if identity is not None and identity != mine else None


class FirstNode(Node):
    """The node that owns the run: it opens rounds, and says how another node ended one."""

    def __init__(self, run: RunFolder, rendezvous: Rendezvous) -> None:
        super().__init__(run, 0, rendezvous.nodes)
        self.rendezvous = rendezvous
        self.endpoint = ""
        self.processes = 1
        self._ended_at: float | None = None

    def go_on(self) -> None:
        """Speak on in the round of a supervisor that is gone."""
        before = read_node(self.run, 0)
        self.said |= {key: before.get(key) for key in ("round", "state", "endpoint", "processes")}
        self.endpoint, self.processes = str(before.get("endpoint") or ""), int(before.get("processes") or 1)
        self.report()

    def not_met(self) -> Cause:
        """Of a round in which no rank began, though all nodes had come."""
        return Cause(
            "rendezvous",
            f"The rendezvous at {visible(self.endpoint)} did not complete: all {self.nodes} nodes came to the run's folder, "
            f"but not each could reach this address within {REACH_SECONDS} s.",
        )

    @property
    def round(self) -> str:
        return str(self.said.get("round") or "")

    def gather(self, processes: int, versions: Mapping[str, str], wait: Callable[[int], None]) -> None:
        """Wait until all nodes have come to a new round, and say go. `wait` is called between looks with how many came, and may
        raise. Raises WorkbenchError where a node does not fit, or too few come in time."""
        self._ended_at, self.processes = None, processes
        self.endpoint = listening(self.rendezvous.endpoint)
        self.report(state="gathering", round=secrets.token_hex(8), endpoint=self.endpoint, processes=processes)
        give_up = time.monotonic() + self.rendezvous.seconds
        while True:
            self.beat()
            came = {
                rank: state
                for rank in range(1, self.nodes)
                if (state := self.read_rank(rank)).get("round") == self.round
            }
            for rank, state in came.items():
                self._require_same(rank, state, processes, versions)
            if len(came) == self.nodes - 1:
                break
            if time.monotonic() > give_up:
                missing = ", ".join(str(rank) for rank in range(1, self.nodes) if rank not in came)
                raise WorkbenchError(
                    f"The rendezvous at {visible(self.endpoint)} did not complete within {self.rendezvous.seconds:g} s: "
                    f"{len(came) + 1} of {self.nodes} nodes came, missing is --node-rank {missing}.",
                    "Start it there too, with the same address and folder of runs, then resume the run.",
                )
            wait(len(came) + 1)
        self.report(state="go")

    @property
    def has_others_elsewhere(self) -> bool:
        """Whether a node is on another machine than this."""
        return any(self.read_rank(rank).get("host") != host() for rank in range(1, self.nodes))

    def _require_same(self, rank: int, state: Mapping[str, Any], processes: int, versions: Mapping[str, str]) -> None:
        """Raises WorkbenchError for a node that cannot take part, naming what differs."""
        name = self.name(rank)
        if state.get("refused"):
            raise WorkbenchError(f"{name}: {visible(str(state['refused']))}")
        theirs = state.get("versions") or {}
        for package in sorted({*versions, *theirs}):
            if versions.get(package) != theirs.get(package):
                raise WorkbenchError(
                    f"{name} has {package} {visible(str(theirs.get(package, 'not installed')))}, node 0 ({host()}) "
                    f"{versions.get(package, 'not installed')}: all nodes of a run need the same.",
                    "Install the same versions, then resume the run.",
                )
        if state.get("processes") != processes:
            raise WorkbenchError(
                f"{name} has {state.get('processes')} devices for the run, node 0 ({host()}) {processes}: "
                "the ranks must divide evenly.",
                "Set run.devices to a number that every node has.",
            )

    def others_end(self) -> bool:
        """Whether another node ended, or fell silent, so long ago that the own processes should be gone."""
        now = time.monotonic()
        over = [rank for rank in range(1, self.nodes) if self._failed(rank) or self.is_silent(rank)]
        if over and self._ended_at is None:
            self._ended_at = now - (FOLLOW_SECONDS if all(map(self.is_silent, over)) else 0)
        return self._ended_at is not None and now - self._ended_at > FOLLOW_SECONDS

    def _failed(self, rank: int) -> bool:
        state = self.read_rank(rank)
        return state.get("round") == self.round and state.get("state") == "ended" and bool(state.get("cause"))

    def round_cause(self) -> Cause | None:
        """Why the round ended, by the words of the other nodes or their silence; None where none of them began it.

        Waits until each has ended or has been silent for long enough.
        """
        give_up = time.monotonic() + SILENT_SECONDS + 5
        others = range(1, self.nodes)
        while time.monotonic() < give_up:
            self.beat()
            if fault := next(filter(None, map(self._own_fault, others)), None):
                return fault
            if all(self._is_over(rank) for rank in others):
                break
            time.sleep(0.1)
        silent = next((rank for rank in others if self.is_silent(rank)), None)
        if silent is None:
            return None
        return Cause(
            "node lost",
            f"{self.name(silent).capitalize()} with {ranks_of(silent, self.processes)} has been silent for "
            f"{SILENT_SECONDS:g} s: the machine, its network or its disk is gone.",
        )

    def _is_over(self, rank: int) -> bool:
        state = self.read_rank(rank)
        return self.is_silent(rank) or (state.get("round") == self.round and state.get("state") == "ended")

    def _own_fault(self, rank: int) -> Cause | None:
        if not self._failed(rank):
            return None
        state = self.read_rank(rank)
        if state.get("follows"):
            return None
        lines = [visible(str(line)) for line in state.get("lines") or []]
        return Cause(visible(str(state["cause"])), visible(str(state.get("message") or "")), tuple(lines))


def ranks_of(node: int, processes: int) -> str:
    """The ranks that work on a node, in words."""
    first, last = node * processes, (node + 1) * processes - 1
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def from_slurm(values: Mapping[str, str]) -> tuple[int, int, str] | None:
    """(node rank, nodes, an id of the step) that SLURM gave this process; None outside of a step on several nodes."""
    try:
        rank, nodes = int(values["SLURM_NODEID"]), int(values.get("SLURM_STEP_NUM_NODES") or values["SLURM_NNODES"])
    except (KeyError, ValueError):
        return None
    return rank, nodes, f"slurm-{values.get('SLURM_JOB_ID', '')}.{values.get('SLURM_STEP_ID', '')}"
