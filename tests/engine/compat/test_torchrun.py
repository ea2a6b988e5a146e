"""The store of torchrun listens at the address of the rendezvous, and at no other of the machine."""

from __future__ import annotations

import datetime
import socket
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from engine.compat import torchrun
from engine.run.spawn import TORCHRUN


def listening() -> set[tuple[str, int]]:
    return {
        (each.laddr.ip, each.laddr.port)
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "::1"])
def test_a_store_listens_at_its_own_address_alone(name):
    if name == "::1" and not socket.has_ipv6:
        pytest.skip("makes no address of this kind")
    endpoint = f"[{name}]:0" if ":" in name else f"{name}:0"
    before = listening()
    handler = torchrun._create(RendezvousParameters("one-address", endpoint, "id", 1, 1, rank="0", timeout="20"))
    found = handler.next_rendezvous()
    info = found.bootstrap_store_info
    assert info is not None
    (own,) = listening() - before
    assert own == (info.master_addr, info.master_port)
    assert own[0] in ("127.0.0.1", "::1")
    other = TCPStore(info.master_addr, info.master_port, None, False, datetime.timedelta(seconds=5))
    other.set("a", "b")
    assert other.get("a") == b"b"
    assert found.store.num_keys() > 0
    assert (found.rank, found.world_size) == (0, 1)


@pytest.mark.parametrize(
    ("interface", "address"),
    [
        ("net0", "127.0.0.3"),
        ("net0,net1", "127.0.0.3"),
        ("lo", "127.0.1.1"),
        ("", "127.0.1.1"),
        ("net9", "127.0.1.1"),
    ],
)
def test_a_machine_that_calls_itself_the_loopback_listens_where_its_interface_is(monkeypatch, interface, address):
    known = {"net0": [SimpleNamespace(family=socket.AF_INET, address="127.0.0.3")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    with torchrun.bound("127.0.1.1", 0, interface) as found:
        assert found.getsockname()[0] == address


def test_the_command_names_what_is_registered():
    assert f"--rdzv-backend={torchrun.BACKEND}" in TORCHRUN
    assert torchrun.__name__ in TORCHRUN
