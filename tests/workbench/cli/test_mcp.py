"""`workbench mcp` before it serves: what is missing, where it looks, and the entry for an assistant's settings."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from mcp import Client, StdioServerParameters

from engine.errors import UsageError
from workbench.cli import mcp

PLAIN = CliRunner()
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("version", "needs"),
    [
        (None, "mcp, which is not installed."),
        ("1.30.0", "mcp 2.1 or newer, below 3; 1.30.0 is installed."),
        ("2.0.1", "mcp 2.1 or newer, below 3; 2.0.1 is installed."),
        ("3.0.0a1", "mcp 2.1 or newer, below 3; 3.0.0a1 is installed."),
    ],
)
def test_without_the_library_or_with_another_it_says_how_to_get_it(
    version: str | None, needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "installed", lambda name: version)
    done = PLAIN.invoke(mcp.command, [])
    assert isinstance(done.exception, UsageError)
    install = "Install it with `pip install 'finetuning-workbench[mcp]'`."
    assert done.exception.full_message == f"This needs the library {needs} {install}"


def test_the_releases_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["mcp"] == [f"mcp>={mcp.OLDEST[0]}.{mcp.OLDEST[1]},<{mcp.BELOW[0]}"]
    assert extras["mcp"][0] in extras["test"]


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
