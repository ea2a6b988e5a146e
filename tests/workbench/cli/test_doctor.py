"""`workbench doctor`: what this machine can do and what would end a run, found by trying."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from engine import hardware
from engine.hardware import GiB, Gpu
from workbench.cli import doctor
from workbench.cli.doctor import command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), standalone_mode=False)


def checks(*arguments: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for check in json.loads(run(*arguments, "--json").output)["checks"]:
        found.setdefault(check["name"], []).append(check)
    return found


def test_the_machine_its_packages_and_the_runs_folder(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    found = checks("--runs", str(place / "runs"))
    assert {"machine", "packages", "optional", "appending", "locks", "runs folder", "logout", "terminal", "hub"} <= set(
        found
    )
    assert "torch " in found["packages"][0]["text"]
    assert found["appending"][0]["state"] == "ok"
    assert found["locks"][0]["state"] == "ok"
    assert os.listdir(place) == []


def test_a_missing_package_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = hardware.installed
    monkeypatch.setattr(hardware, "installed", lambda name: None if name in ("trl", "bitsandbytes") else real(name))
    result = run("--runs", str(tmp_path))
    assert result.return_value == 1
    assert "trl missing: pip install" in result.output
    assert "bitsandbytes is not installed: 4-bit" in result.output


def test_kernels_that_these_cards_leave_out_are_told_with_what_brings_them_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = {"flash-linear-attention": "0.6.0", "triton": "3.6.0", "tilelang": None}
    real = hardware.installed
    monkeypatch.setattr(hardware, "installed", lambda name: here[name] if name in here else real(name))
    monkeypatch.setattr(hardware, "_gpus", lambda: (Gpu("NVIDIA H100 80GB HBM3", 80 * GiB, (9, 0)),))
    left_out = "flash-linear-attention is left out: on a Hopper card its gradients need Triton 3.7.1"
    assert left_out in run("--runs", str(tmp_path)).output
    here["triton"] = "3.7.1"
    output = run("--runs", str(tmp_path)).output
    assert left_out not in output
    assert "flash-linear-attention 0.6.0" in output


def test_cards_are_named_with_what_they_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cards = (Gpu("NVIDIA H100 80GB HBM3", 80 * GiB, (9, 0)), Gpu("Tesla T4", 15 * GiB, (7, 5)))
    monkeypatch.setattr(hardware, "_gpus", lambda: cards)
    output = run("--runs", str(tmp_path)).output
    assert "NVIDIA H100 80GB HBM3, 80.0 GiB, capability 9.0, bfloat16" in output
    assert "float16 only" in output


def test_a_file_system_without_locks_or_appending_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from engine.run import launch

    monkeypatch.setattr(launch, "locks_hold", lambda place: (False, "this file system has no locks"))
    monkeypatch.setattr(doctor, "_append_holds", lambda place: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    found = checks("--runs", str(tmp_path))
    assert found["locks"][0] == {"name": "locks", "state": "warning", "text": "this file system has no locks"}
    assert found["appending"][0]["state"] == "error"


def test_a_folder_that_cannot_be_written_is_an_error(own_folder: Path) -> None:
    own_folder.chmod(0o500)
    found = checks("--runs", str(own_folder / "runs"))["runs folder"][0]
    assert found["state"] == "error"
    assert "cannot be written" in found["text"]


def test_home_is_hidden_and_names_are_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)
    output = run("--runs", str(tmp_path / "a\x1b[31mb")).output
    assert str(tmp_path) not in output
    assert "\x1b[31mb" not in output


def test_it_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['workbench', 'doctor', '--runs', {str(tmp_path)!r}]\n"
        "from workbench.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'trl', 'pandas', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or None)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_what_joins_the_gpus_and_what_nccl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpu_links", lambda: {"NVLink": 4, "the processors' own link": 2})
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    links, nccl = doctor._between_gpus(4)
    assert (links.state, links.text.split(";")[0]) == (
        "note", "4 of 6 pairs over NVLink, 2 of 6 pairs over the processors' own link"
    )  # fmt: skip
    assert "NCCL_P2P_DISABLE=1" in nccl.text
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=of-no-machine")
    (absent,) = doctor._between_gpus(1)
    assert absent.state == "error"
    assert "has no network interface" in absent.text


def test_links_are_asked_of_the_driver() -> None:
    """By a driver that is played: pairs of 0 and 1 are joined by NVLink, those with 2 by a switch."""
    driver = SimpleNamespace(
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        nvmlDeviceGetP2PStatus=lambda one, other, kind: 0 if other == 1 and kind == 2 else 5,
        nvmlDeviceGetTopologyCommonAncestor=lambda one, other: 10,
    )
    assert hardware._links(cast(Any, driver), [0, 1, 2]) == {"NVLink": 1, "one PCIe switch": 2}
