"""What a launch says to the compiler of the card that is there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.kernels import device, gated_sums
from engine.kernels.gated_sums import BACKWARD, _Plan


@pytest.mark.parametrize(("backend", "options"), [("nvidia", "CUDAOptions"), ("amd", "HIPOptions")])
def test_a_launch_gives_options_that_its_backend_has(
    backend: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton refuses a launch with an option that is none of its backend's: ROCm's bounds no registers."""
    compiler = pytest.importorskip(f"triton.backends.{backend}.compiler")
    known = {field.name for field in dataclasses.fields(getattr(compiler, options))}
    monkeypatch.setattr(torch.version, "hip", "7.0" if backend == "amd" else None)
    wide = [torch.empty(256, 512, dtype=torch.bfloat16)] * 3
    given = _Plan(BACKWARD.candidates[0], 256, 512, [16, 16], wide).options | device.register_limit(192)
    assert set(given) <= known
    assert ("maxnreg" in given) == (backend == "nvidia")


def test_registers_are_bounded_in_one_place() -> None:
    folder = Path(gated_sums.__file__).parents[1]
    assert [file.name for file in folder.rglob("*.py") if "maxnreg" in file.read_text()] == ["device.py"]
