"""`workbench mcp` before it serves: what is missing, where it looks, and the entry for an assistant's settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from mcp import Client, StdioServerParameters

from engine.errors import UsageError
from workbench.cli import mcp

PLAIN = CliRunner()


def test_without_the_library_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "find_spec", lambda name: None)
    done = PLAIN.invoke(mcp.command, [])
    assert isinstance(done.exception, UsageError)
    assert done.exception.full_message == (
        "This needs the library mcp, which is not installed. Install it with `pip install 'finetuning-workbench[mcp]'`."
    )


def test_on_a_terminal_it_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(UsageError, match="an assistant starts this"):
        mcp.command.main([], standalone_mode=False)


async def test_the_entry_that_it_prints_starts_a_server(tmp_path: Path) -> None:
    project = tmp_path / "a project"
    project.mkdir()
    (project / "my.yaml").write_text("model: {name: builtin/tiny}\n")
    done = PLAIN.invoke(mcp.command, ["--root", str(project), "--runs", "elsewhere", "--allow-launch", "--json"])
    entry = json.loads(done.output)["mcpServers"]["workbench"]
    assert entry["args"][-6:] == [
        "mcp", "--root", str(project), "--runs", str(Path.cwd() / "elsewhere"), "--allow-launch"
    ]  # fmt: skip
    async with Client(StdioServerParameters(**entry, cwd=tmp_path)) as client:
        found = (await client.call_tool("list_configs", {})).structured_content
        runs = (await client.call_tool("list_runs", {})).structured_content
    assert found is not None
    assert runs is not None
    assert [each["file"] for each in found["configs"]] == [str(project / "my.yaml")]
    assert runs["folder"] == str(Path.cwd() / "elsewhere")
