"""Every demo script does what it shows, from a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.builtin import dates
from engine.run.store import RunFolder

DEMOS = Path(__file__).parents[2] / "demos"


def play(script: str, folder: Path, steps: int, timeout: float = 280) -> str:
    """What the script prints; it runs with `steps` optimizer steps a run."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(DEMOS / script), str(folder)],
        env={**os.environ, "PATH": path, "STEPS": str(steps)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def events(folder: Path, run: str, kind: str) -> list[dict]:
    lines = RunFolder(folder / "runs" / run).events.read_text("utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_the_first_run_is_checked_previewed_stopped_taken_up_and_finished(tmp_path: Path) -> None:
    said = play("first_run.sh", tmp_path, steps=20)
    assert "‹" in said
    assert "finished" in said
    assert [event["segment"] for event in events(tmp_path, "dates-0001", "started")] == [0, 1]
    (stopped,) = events(tmp_path, "dates-0001", "stopped")
    assert events(tmp_path, "dates-0001", "started")[1]["resumed_from_step"] == stopped["step"]
    assert events(tmp_path, "dates-0001", "finished")[0]["step"] == 20
    first, *_, last = [e for e in events(tmp_path, "dates-0001", "sample") if e["index"] == 0]
    assert first["prompt"] == dates.PROMPTS[0]
    assert first["completion"] != last["completion"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lora_and_dpo_go_on_from_the_first_run(tmp_path: Path) -> None:
    play("lora.sh", tmp_path, steps=150)
    held_out = [event["eval_loss"] for event in events(tmp_path, "german-0001", "metrics") if "eval_loss" in event]
    assert held_out[-1] < 0.9 * held_out[0]
    trained = next(e for e in events(tmp_path, "german-0001", "receipt")[0]["entries"] if e["feature"] == "adapter")
    assert trained["count"] > 0
    play("dpo.sh", tmp_path, steps=30)
    losses = [event["loss"] for event in events(tmp_path, "pairs-0001", "metrics") if "loss" in event]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.5


@pytest.mark.slow
def test_plain_text_is_learned(tmp_path: Path) -> None:
    play("pretrain.sh", tmp_path, steps=60)
    losses = [event["loss"] for event in events(tmp_path, "text-0001", "metrics") if "loss" in event]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rewards_alone_teach(tmp_path: Path) -> None:
    play("grpo_dates.sh", tmp_path, steps=150, timeout=1100)
    right = [e["rewards/exact_match/mean"] for e in events(tmp_path, "grpo-dates-0001", "metrics")]
    assert sum(right[-20:]) / 20 > sum(right[:20]) / 20 + 0.05
    assert events(tmp_path, "grpo-dates-0001", "rollout")


@pytest.mark.parametrize("kind", ["german", "pairs", "text"])
def test_made_rows_repeat_and_hold_the_same_days_out(kind: str, tmp_path: Path) -> None:
    def made(name: str, *options: str) -> str:
        file = tmp_path / name
        script = [sys.executable, "-P", str(DEMOS / "make_rows.py"), kind, str(file), "--count", "300", *options]
        subprocess.run(script, check=True)
        return file.read_text("utf-8")

    train = made("first")
    assert made("second") == train
    held_out = {day.isoformat() for day in dates.held_out_days()} | {f"{d:%d.%m.%Y}" for d in dates.held_out_days()}
    unseen = made("held out", "--held-out")
    assert not any(day in train for day in held_out)
    assert all(any(day in line for day in held_out) for line in unseen.splitlines())
