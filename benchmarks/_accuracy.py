"""No figure of a kernel while its accuracy cases fail: they run first, on the device that is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

CASES = Path(__file__).parents[1] / "tests/engine/kernels/kernel_cases.py"


def refuse_while_red(*names: str) -> None:
    """Runs these cases of `kernel_cases.py`, each in a process of its own; ends the script where one fails.

    Without a card they run in Triton's interpreter.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0" if torch.cuda.is_available() else "1"}
    runs = [
        subprocess.Popen([sys.executable, CASES, name], stdout=subprocess.PIPE, text=True, env=environment)
        for name in names
    ]
    lines = [line for run in runs for line in run.communicate()[0].splitlines()]
    if any(run.returncode for run in runs):
        print("\n".join(line for line in lines if not line.startswith("ok")))
        sys.exit("The accuracy cases fail: no figures are reported.")
    print(f"{sum(line.startswith('ok') for line in lines)} accuracy cases hold", flush=True)
