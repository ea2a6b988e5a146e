"""What an assistant may not reach, whatever it names: by the server that runs, and by the roots alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError
from PIL import Image

from engine.errors import RunNotFound, UsageError
from engine.run import store
from engine.run.inside import UnsafeRunFile
from tests.workbench.assistants.conftest import served
from workbench.assistants.roots import Roots, root_of

SECRET = "the secret of another folder"


@pytest.fixture
def outside(project: Path, tmp_path: Path) -> Path:
    """A folder beside the project with things worth reading, and links to them in the project."""
    out = tmp_path / "outside"
    (out / "model").mkdir(parents=True)
    (out / "run-0001").mkdir()
    (out / "rows.jsonl").write_text(json.dumps({"prompt": SECRET, "completion": SECRET}) + "\n")
    (out / "secret.yaml").write_text(f"model: {{name: '{SECRET}'}}\n")
    (out / "model" / "config.json").write_text(json.dumps({"model_type": SECRET}))
    Image.new("RGB", (32, 32), "red").save(out / "dot.png")
    for name in ("config.yaml", "run.json", "events.jsonl"):
        (out / "run-0001" / name).write_text(json.dumps({"cause": SECRET, "state": "failed"}))
    (project / "link.yaml").symlink_to(out / "secret.yaml")
    (project / "link.jsonl").symlink_to(out / "rows.jsonl")
    (project / "model").symlink_to(out / "model")
    (project / "folder").mkdir()
    (project / "folder" / "rows.jsonl").symlink_to(out / "rows.jsonl")
    (project / ".hidden").mkdir()
    (project / ".hidden" / "my.yaml").write_text((project / "my.yaml").read_text())
    (project / ".env").write_text(f"KEY={SECRET}\n")
    os.mkfifo(project / "pipe.yaml")
    (project / "runs").mkdir()
    (project / "runs" / "run-0001").symlink_to(out / "run-0001")
    return out


FILES = [
    "/etc/passwd", "../outside/secret.yaml", "link.yaml", ".hidden/my.yaml", ".env", "pipe.yaml", "rows.jsonl", "~/x.yaml",
    "a\0b.yaml", "x" * 5000, "/proc/self/environ", "/dev/zero", "folder/../../outside/secret.yaml", "//etc//passwd.yaml",
]  # fmt: skip
PLACES = [
    "data.train.0.path=/etc/hostname", "data.train.0.path=../outside/rows.jsonl", "data.train.0.path=link.jsonl",
    "data.train.0.path=folder", "data.train.0.path=.env", "data.train.0.path=s3://bucket/rows.jsonl",
    "data.train.0.path=file:///etc/hostname", "data.train.0.path=http://169.254.169.254/rows.jsonl",
    "data.eval.0.path=~/rows.jsonl", "data.train=['/etc/hostname']", "data.train.0.chat_template=/etc/hostname",
    "model.name=/etc", "model.name=./model", "model.name=model", "model.tokenizer=../outside/model",
    "model.chat_template=../outside/secret.yaml", "adapter.path=../outside/model", "data.image_base_dir=/",
    "data.dataset_prepared_path=/tmp/x", "run.output_dir=../outside", "method.reward_funcs=['/etc/x.py:f']",
    "method.reward_funcs=['0.5 * json_schema:../outside/s.json']", "method.reward_funcs=model:../outside/model",
]  # fmt: skip
RUNS = ["run-0001", "runs/run-0001", "../outside/run-0001", "/etc", "..", "../..", "a\0b", "~", "x" * 5000]


async def test_nothing_outside_is_read_by_any_tool(project: Path, outside: Path) -> None:
    rl = {"method": {"kind": "grpo"}, "model": {"name": "builtin/tiny"}, "data": {"train": [{"path": "rows.jsonl"}]}}
    (project / "rl.yaml").write_text(json.dumps(rl))
    said: list[str] = []
    async with served(project, "--allow-launch") as server:
        for name in FILES:
            said.append(await server.refused("check", file=name))
            said.append(await server.refused("read_config", file=name))
        for setting in PLACES:
            file = "rl.yaml" if setting.startswith("method") else "my.yaml"
            for tool in ("check", "preview", "estimate", "launch"):
                told = await server.refused(tool, file=file, settings=[setting])
                assert "this server looks into" in told or "not fetched for an assistant" in told, (setting, told)
                said.append(told)
        for name in RUNS:
            for tool in ("watch", "log", "receipt", "post_mortem", "stop"):
                said.append(await server.refused(tool, run=name))
        for name in ("run-0001", "..%2F..%2Foutside%2Frun-0001", "%2Fetc", "../../outside/run-0001"):
            for part in ("config", "events", "log"):
                with pytest.raises(MCPError) as caught:
                    await server.client.read_resource(f"workbench://runs/{name}/{part}")
                said.append(str(caught.value))
        said.append(json.dumps(await server.get("list_configs")))
        said.append(json.dumps(await server.get("list_runs")))
        assert (await server.client.list_resources()).resources == []
    assert not [each for each in said if SECRET in each]
    assert "hidden" not in said[-2]
    assert "link.yaml" not in said[-2]
    assert sorted(path.name for path in outside.iterdir()) == [
        "dot.png",
        "model",
        "rows.jsonl",
        "run-0001",
        "secret.yaml",
    ]
    assert [path.name for path in (project / "runs").iterdir()] == ["run-0001"]


async def test_images_that_rows_name_stay_inside_too(project: Path, outside: Path) -> None:
    (project / "dot.png").write_bytes((outside / "dot.png").read_bytes())
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A dot."}]
    rows = [{"images": [name], "messages": turns} for name in ("dot.png", str(outside / "dot.png"))]
    (project / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"model": {"name": "builtin/tiny-vl"}, "data": {"train": [{"path": "seen.jsonl"}]}}
    (project / "seen.yaml").write_text(json.dumps(config))
    async with served(project) as server:
        inside, beyond = (await server.get("preview", file="seen.yaml", count=2))["rows"]
    assert (inside["error"], len(inside["images"])) == (None, 1)
    assert "leads out of the folders that may be read" in beyond["error"]
    assert beyond["images"] == []


def test_another_root_opens_another_folder(project: Path, outside: Path) -> None:
    roots = Roots([root_of(project), root_of(outside)], project / "runs")
    mapping = {"data": {"train": "../outside/rows.jsonl"}, "model": {"name": "model"}}
    roots.judge(mapping, project)
    assert roots.config_file("../outside/secret.yaml")
    with pytest.raises(UsageError, match=r"model\.name: .* leads elsewhere"):
        Roots([root_of(project)], project / "runs").judge(mapping, project)


def test_hub_names_and_what_is_built_in_are_no_paths(project: Path) -> None:
    names: dict[str, Any] = {
        "model": {"name": "org/model"},
        "data": {"train": ["builtin/dates", "hf://datasets/a/b.jsonl"]},
    }
    Roots([project], project / "runs").judge(names, project)


@pytest.mark.parametrize("folder", ["/", "~", "nothing", "my.yaml"])
def test_what_holds_everything_is_no_root(project: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project))
    with pytest.raises(UsageError, match="--root: must be"):
        root_of(Path(folder))


def test_a_run_is_found_in_the_folder_of_runs_and_by_its_path(project: Path) -> None:
    run = store.create(project / "runs", "version: 1\n", {"name": "x"})
    roots = Roots([project], project / "runs")
    assert roots.run("x-0001").path == roots.run("runs/x-0001").path == run.path
    with pytest.raises(RunNotFound, match="no run is called"):
        roots.run("x-0002")
    run.log.symlink_to("/etc/passwd")
    with pytest.raises(UnsafeRunFile, match="is a symbolic link"):
        roots.run("x-0001")
