"""A finished run of four checkpoints, whose second is the best by held-out rows, written without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.run import checkpoint, store
from engine.run.store import RunFolder


def steps(run: RunFolder) -> list[int]:
    """The steps whose checkpoints are there."""
    return sorted(checkpoint.step_of(path) or 0 for path in checkpoint.newest_first(run))


def run_of_four(root: Path, state: str = "finished") -> RunFolder:
    """Held-out losses 3, 1, 1.5 and 2; a pinned prompt is answered at each but the third."""
    made = store.create(root / "runs", "version: 1\n", {"name": "my", "method": "sft", "model": "m"})
    events: list[dict[str, Any]] = [{"kind": "started", "method": "sft", "model": "m", "max_steps": 4}]
    for step, loss in ((1, 3.0), (2, 1.0), (3, 1.5), (4, 2.0)):
        tmp = checkpoint.begin(made, step)
        (tmp / "model.safetensors").write_bytes(bytes(1000 * step))
        checkpoint.commit(tmp, {})
        events.append({"kind": "metrics", "step": step, "eval_loss": loss})
        if step != 3:
            asked = {"step": step, "index": 0, "prompt": "When?", "completion": f"\x1bday {step}"}
            events.append({"kind": "sample", **asked})
        if step <= 2:
            events.append({"kind": "best", "step": step, "metric": "eval_loss", "value": loss})
        events.append({"kind": "checkpoint", "step": step, "path": f"checkpoint-{step}", "state": "committed"})
    events.append({"kind": state, "step": 4, "seconds": 1.0})
    lines = [{"v": 1, "seq": seq, "t": 1e9 + seq, "rank": 0, "segment": 0, **event} for seq, event in enumerate(events)]
    made.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made.update_json(state=state)
    return made
