"""Work for an assistant: its progress only grows, and it ends with the call."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import psutil
import pytest

from engine.errors import WorkbenchError
from workbench.assistants.jobs import Job, Jobs

CONFIG = {"model": {"name": "builtin/tiny"}, "data": {"train": [{"path": "builtin/dates"}]}}


async def test_a_question_that_is_cancelled_leaves_no_process_at_work(tmp_path: Path) -> None:
    told = list[tuple[float, str]]()
    jobs = Jobs()
    try:
        with anyio.CancelScope() as scope:

            async def tell(progress: float, total: float | None, message: str) -> None:
                told.append((progress, message))
                if "tokenizing" in message:
                    scope.cancel()

            await jobs.run(lambda job: job.ask("data", config=CONFIG, base=str(tmp_path)), tell)
        assert scope.cancelled_caught
        assert [progress for progress, _ in told] == sorted({progress for progress, _ in told})
        pid = (await jobs.run(lambda job: job.ask("hello"), tell))["pid"]
        inspector = psutil.Process(pid)
        with anyio.fail_after(20):
            while any(_busy(child) for child in inspector.children()):
                await anyio.sleep(0.05)
    finally:
        jobs.close()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _busy(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


async def test_work_ends_with_the_call_that_wanted_it() -> None:
    ended = threading.Event()
    jobs = Jobs()

    def work(job: Job) -> None:
        job.say("waiting")
        try:
            job.wait(3600)
        finally:
            ended.set()

    with anyio.CancelScope() as scope:

        async def tell(progress: float, total: float | None, message: str) -> None:
            scope.cancel()

        await jobs.run(work, tell)
    assert await anyio.to_thread.run_sync(ended.wait, 10)
    jobs.close()


async def test_an_error_is_that_of_the_work_and_what_it_said_last_is_told() -> None:
    told = list[tuple[float, float | None, str]]()

    async def tell(progress: float, total: float | None, message: str) -> None:
        told.append((progress, total, message))

    def work(job: Job) -> None:
        job.say("step 3 of 5", 3, 5)
        raise WorkbenchError("it broke")

    jobs = Jobs()
    try:
        with pytest.raises(WorkbenchError, match="it broke"):
            await jobs.run(work, tell)
    finally:
        jobs.close()
    assert told == [(3, 5, "step 3 of 5")]
