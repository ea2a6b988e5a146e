"""A project and a server over it: `workbench mcp` as a process of its own, spoken with by the library's own client."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import CallToolResult, ElicitResult

from engine.run import store
from engine.run.process import send

ROOT = Path(__file__).parents[3]
SMALL = ROOT / "tests" / "fault" / "small_worker"
CONFIG = """\
model: {name: builtin/tiny, dtype: float32}
data: {train: [{path: rows.jsonl}], max_length: 64}
optim: {max_steps: 3, per_device_train_batch_size: 2}
run: {name: mine, save_steps: 3}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with `my.yaml`, CONFIG, and eight rows. What still runs afterwards is killed."""
    here = tmp_path / "project"
    here.mkdir()
    (here / "my.yaml").write_text(CONFIG)
    rows = [
        {"prompt": f"Say {word}.", "completion": word}
        for word in ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    ]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(here)
    yield here
    for run in store.runs_in(here / "runs"):
        for who in (run.supervisor(), run.worker()):
            if who is not None:
                send(who, signal.SIGKILL)


class Person:
    """Who is asked: `answers` are given one after the other, the last one again and again; `asked` is what was shown."""

    def __init__(self, *answers: ElicitResult) -> None:
        self.answers, self.asked = list(answers), list[str]()
        self.meanwhile: Callable[[], object] = lambda: None

    async def __call__(self, context: Any, params: Any) -> ElicitResult:
        self.asked.append(params.message)
        self.meanwhile()
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def yes(name: str) -> ElicitResult:
    """The box of this name ticked."""
    return ElicitResult(action="accept", content={name: True})


class Served:
    """A server's other end."""

    def __init__(self, client: Client) -> None:
        self.client, self.told = client, list[tuple[float, float | None, str | None]]()

    async def call(self, name: str, /, **arguments: Any) -> CallToolResult:
        async def tell(progress: float, total: float | None, message: str | None) -> None:
            self.told.append((progress, total, message))

        return await self.client.call_tool(name, arguments, progress_callback=tell)

    async def get(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """What a tool answers; that it is no error, and the same as text, is seen to."""
        result = await self.call(name, **arguments)
        text = said(result)
        assert not result.is_error, text
        assert json.loads(text) == result.structured_content
        return result.structured_content or {}

    async def refused(self, name: str, /, **arguments: Any) -> str:
        """What a tool says that does not answer."""
        result = await self.call(name, **arguments)
        assert result.is_error, said(result)
        assert "Traceback" not in said(result)
        return said(result)


def said(result: CallToolResult) -> str:
    """The text of a result."""
    (block,) = result.content
    assert block.type == "text"
    return block.text


@asynccontextmanager
async def served(
    project: Path, *flags: str, person: Person | None = None, mode: str = "auto", small: dict[str, Any] | None = None
) -> AsyncIterator[Served]:
    """A server in `project`. Without a person its client cannot ask; with `small` runs have the worker without torch. Nothing may
    be written to standard error."""
    environment = dict(os.environ)
    if small is not None:
        environment |= {"PYTHONPATH": f"{SMALL}{os.pathsep}{ROOT}", "SMALL_WORKER": json.dumps(small)}
    command = StdioServerParameters(
        command=sys.executable, args=["-P", "-m", "workbench", "mcp", *flags], cwd=project, env=environment
    )
    with tempfile.TemporaryFile("w+") as noise:
        async with Client(stdio_client(command, errlog=noise), mode=mode, elicitation_callback=person) as client:
            yield Served(client)
        noise.seek(0)
        assert noise.read() == ""
