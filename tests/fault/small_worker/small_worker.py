"""A worker without torch that keeps the whole contract: lock, events, controls, checkpoints, exact resume.

Its config is JSON (which is YAML): steps, step_seconds, save_steps, and faults to act out at a step: `die` (exit code at
`die_at`, in every start with `die_again`),
`raise_at`, `deaf` (answers nothing), `fork_at` (leaves a forked child), `eat_at` (takes memory until it is ended),
`eat_when` (the same, once that file is there), `save_seconds` (is slow to save), `leave_seconds` (is slow to go).
"""

import json
import os
import signal
import sys
import time

from engine.run import checkpoint
from engine.run.control import Controls
from engine.run.events import EventWriter, Thinning
from engine.run.lock import RunLock
from engine.run.store import RunFolder


def settings(text: str) -> dict:
    """JSON as it is; of a real config the number of steps, with the rest from the environment."""
    if text.startswith("{"):
        return json.loads(text)
    from engine.config.files import parse

    given = json.loads(os.environ.get("SMALL_WORKER", "{}"))
    return {"steps": parse(text).mapping["optim"]["max_steps"] or 50, **given}


def next_loss(loss: float, step: int) -> float:
    return loss * 0.97 + 0.001 * ((step * 7919) % 13)


def save(run: RunFolder, writer: EventWriter, step: int, loss: float, seconds: float = 0.0) -> None:
    begun = time.monotonic()
    writer.write("checkpoint", step=step, path=f"checkpoint-{step}", bytes=None, seconds=None, state="saving")
    tmp = checkpoint.begin(run, step)
    (tmp / "state.json").write_text(json.dumps({"step": step, "loss": loss}))
    (tmp / "weights").mkdir()
    (tmp / "weights" / "w.bin").write_bytes(os.urandom(1000))
    time.sleep(seconds)
    final = checkpoint.commit(tmp, {"config_hash": "none"})
    writer.write(
        "checkpoint",
        step=step,
        path=final.name,
        bytes=checkpoint.size_of(final),
        seconds=time.monotonic() - begun,
        state="committed",
    )
    for gone in checkpoint.prune(run, 2):
        writer.write("checkpoint", step=checkpoint.step_of(gone), path=gone.name, state="deleted")


def main(folder: str) -> int:
    run = RunFolder(folder)
    with RunLock(run):
        checkpoint.collect(run)
        config = settings(run.config.read_text())
        writer = EventWriter(run)
        controls = Controls(run, writer)
        if not config.get("deaf"):
            controls.on_signals()
        elif config["deaf"] == "signals too":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        writer.write("phase", name="Loading the small model")
        time.sleep(config.get("load_seconds", 0))
        return train(run, config, writer, controls)


def train(run: RunFolder, config: dict, writer: EventWriter, controls: Controls) -> int:
    newest, _ = checkpoint.newest_valid(run)
    step, loss = 0, 2.0
    if newest:
        state = json.loads((newest / "state.json").read_text())
        step, loss = state["step"], state["loss"]
    steps = config["steps"]
    policy = Thinning(max_steps=steps)
    writer.write(
        "started",
        method="small",
        model="small",
        max_steps=steps,
        epochs=1,
        resumed_from_step=step if newest else None,
        world_size=1,
        devices=[],
        **policy.started(),
    )
    stopping = None
    eaten: list[bytearray] = []
    while step < steps and stopping is None:
        if config.get("fork_at") == step and os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        if config.get("die") and config.get("die_at") == step and (writer.segment == 0 or config.get("die_again")):
            os._exit(config["die"])
        while config.get("eat_at") == step or os.path.exists(config.get("eat_when", "")):
            eaten.append(bytearray(os.urandom(1 << 20)) * 8)
        if config.get("raise_at") == step:
            raise RuntimeError("the small model broke")
        step, loss = step + 1, next_loss(loss, step + 1)
        time.sleep(config.get("step_seconds", 0))
        if policy.wants(step):
            writer.write(
                "metrics", step=step, epoch=step / steps, loss=loss, step_seconds=config.get("step_seconds", 0)
            )
        if step % config.get("save_steps", 10) == 0:
            save(run, writer, step, loss, config.get("save_seconds", 0))
        if config.get("deaf"):
            continue
        for asked in controls.pending():
            controls.answer(asked, "accepted")
            if asked.do != "stop":
                save(run, writer, step, loss)
            controls.answer(asked, "done", f"at step {step}")
            if asked.do != "checkpoint":
                stopping = asked
    if stopping:
        writer.write("stopped", step=step, seconds=1.0, by=stopping.by)
    else:
        save(run, writer, step, loss)
        writer.write("finished", step=step, seconds=1.0)
    writer.close()
    time.sleep(config.get("leave_seconds", 0))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
