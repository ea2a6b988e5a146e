"""What the environment says of the network between ranks, and interfaces that are not there."""

from __future__ import annotations

import pytest

from engine.errors import WorkbenchError
from engine.run.network import absent_interface, refuse_absent, settings

HERE = ("lo", "eth0", "ib0", "ib1")


@pytest.mark.parametrize(
    "told", [{}, {"NCCL_SOCKET_IFNAME": "ib"}, {"NCCL_SOCKET_IFNAME": "=eth0,wlan0"}, {"NCCL_SOCKET_IFNAME": "^wlan"},
             {"GLOO_SOCKET_IFNAME": "eth0,lo"}],
)  # fmt: skip
def test_interfaces_that_are_there(told: dict[str, str]) -> None:
    assert absent_interface(told, HERE) == ""


@pytest.mark.parametrize(
    ("variable", "name"), [("NCCL_SOCKET_IFNAME", "eno1"), ("NCCL_SOCKET_IFNAME", "=ib"), ("GLOO_SOCKET_IFNAME", "ib")]
)
def test_one_that_is_not_there_is_named_with_those_that_are(variable: str, name: str) -> None:
    said = absent_interface({variable: name}, HERE)
    assert said.startswith(f"{variable}: ")
    assert f"has no network interface '{name}'; it has lo, eth0, ib0, ib1." in said
    with pytest.raises(WorkbenchError, match="no network interface"):
        refuse_absent({variable: f"{name}-of-no-machine"})


def test_settings_are_told_as_they_stand() -> None:
    told = {"NCCL_P2P_DISABLE": "1", "HOME": "/root", "GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO"}
    assert settings(told) == "GLOO_SOCKET_IFNAME=lo, NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1"
    assert settings({f"NCCL_{number:02}": "1" for number in range(20)}).endswith("NCCL_11=1, …")
