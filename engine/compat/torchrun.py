"""torchrun whose store listens at one address alone: `python -m engine.compat.torchrun` takes torchrun's own arguments.

A store of torch listens on every interface of its machine, whatever address it is given, and asks nobody for a password; the
`c10d` rendezvous even unpickles what it finds there. Here the socket is bound to the address of the rendezvous first and
handed over. Both are torch's own ways: the registry of rendezvous, and a store's `master_listen_fd`.
"""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

BACKEND = "one-address"
"""torchrun's `--rdzv-backend`. `--rdzv-conf` takes `rank`, this node's, and `timeout` in seconds."""


class OneAddress(StaticTCPRendezvous):
    """torchrun's static rendezvous, whose store on the first node is bound to the address itself, port 0 being a free one."""

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises OSError where the address is none of this machine, or the port is taken."""
        if self.rank == 0 and self._store is None:
            with bound(self.master_addr, self.master_port, os.environ.get("GLOO_SOCKET_IFNAME", "")) as listening:
                self.master_addr, self.master_port = listening.getsockname()[:2]
                self._store = TCPStore(
                    self.master_addr, self.master_port, self.world_size, True, self.timeout,
                    master_listen_fd=listening.detach(),
                )  # fmt: skip
        return super().next_rendezvous()


def bound(name: str, port: int, interface: str = "") -> socket.socket:
    """A socket that is bound to what the name is here. Many a machine calls itself 127.0.1.1, where no other reaches it: then it
    is the address of the interface, if one other than the loopback was chosen."""
    family, kind, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    first = interface.partition(",")[0]  # gloo takes several
    if ipaddress.ip_address(address[0]).is_loopback and first not in ("", "lo"):
        known = psutil.net_if_addrs().get(first, [])
        own = next((each.address for each in known if each.family == socket.AF_INET), None)
        family, address = (socket.AF_INET, (own, port)) if own is not None else (family, address)
    found = socket.socket(family, kind)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found


def _create(given: RendezvousParameters) -> RendezvousHandler:
    name, port = parse_rendezvous_endpoint(given.endpoint, 0)
    return OneAddress(
        name, port, int(given.get("rank", 0)), given.max_nodes, given.run_id, int(given.get("timeout", 600))
    )


if __name__ == "__main__":
    from torch.distributed.run import main

    rendezvous_handler_registry.register(BACKEND, _create)
    main()
