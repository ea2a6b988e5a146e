"""Messages about a run that app and notebook show alike: of pages that are empty yet, of answers, of damaged events."""

from __future__ import annotations

from engine.figures import count
from engine.run.view import RunView

NO_SAMPLES = "No samples. Set run.prompts to see answers change while the model learns."
NO_RECEIPT = "The receipt is written before the first step."
NO_WORDS = "no words"
"""Stands for an answer of blanks alone, which would look like none at all."""


def replay_text(step: int) -> str:
    """What a group is that was sampled in an earlier step."""
    return f"Replayed: the model of step {count(step)} gave these answers, and they are trained on again. No reward curve has them."


def sample_time(step: int) -> str:
    """When a sample was taken: `before` the first step, or its step."""
    return f"step {count(step)}" if step else "before"


def damaged(view: RunView) -> str:
    """How many lines of the events could not be read; empty where there were none."""
    if not view.bad_lines:
        return ""
    lines, were = ("line", "was") if view.bad_lines == 1 else ("lines", "were")
    return f"{count(view.bad_lines)} damaged {lines} in events.jsonl {were} passed over"
