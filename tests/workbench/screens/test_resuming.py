"""Ways on from a run: only one that is finished is trained longer."""

from __future__ import annotations

from typing import Any

import pytest

from engine.run.view import RunView
from workbench.screens.resuming import Resuming


@pytest.mark.parametrize("state", ["running", "failed", "stopped", "lost"])
def test_only_a_finished_run_is_trained_longer(state: str) -> None:
    said: list[str] = []

    class Beside:
        def show(self, words: str, seconds: float) -> None:
            said.append(words)

    nothing: Any = None
    beside: Any = Beside()
    Resuming(nothing, beside, lambda run: None).longer(nothing, RunView(state=state))
    assert said == [f"This run is {state}; one that is finished can be trained longer."]
