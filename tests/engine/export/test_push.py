"""A push against a server on the loopback that speaks what is used of the hub's protocol, and one that stalls."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import HANG, TOKEN, Hub, serving

CODE = (
    "import sys; from pathlib import Path; from engine.errors import WorkbenchError\n"
    "from engine.export.push import upload\n"
    "try: print(upload(Path(sys.argv[1]), 'me/model', private=True, report=lambda *_: None))\n"
    "except WorkbenchError as problem: print(problem.full_message); sys.exit(problem.exit_code)\n"
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as server:
        yield server


def pushed(hub: Hub, tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    environment = {**os.environ, **hub.environment(tmp_path / "home"), **more}
    return subprocess.run(
        [sys.executable, "-P", "-c", CODE, str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_folder_arrives_whole(hub: Hub, tmp_path: Path) -> None:
    done = pushed(hub, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith(f"/me/model/commit/{1:040x}")
    assert hub.private is True
    assert hub.files == {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights" * 1000}
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.parametrize("where", ["/api/repos/create", "/preupload/", "/store/", "/commit/"])
def test_a_hub_that_stalls_is_an_error_in_time(hub: Hub, tmp_path: Path, where: str) -> None:
    begun = time.monotonic()
    hub.fails = [(where, HANG, 9)]
    done = pushed(hub, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "127.0.0.1 did not answer within 2 s" in done.stdout
    assert time.monotonic() - begun < 60
    assert sum(where in each for each in hub.asked) == 1, "it is asked once"


def test_a_refusal_does_not_show_the_token(hub: Hub, tmp_path: Path) -> None:
    hub.fails = [("/commit/", 403, 1)]
    done = pushed(hub, tmp_path)
    assert done.returncode == 1
    assert "push: the hub refused me/model" in done.stdout
    assert TOKEN not in done.stdout + done.stderr


def test_without_a_token_nothing_is_asked(hub: Hub, tmp_path: Path) -> None:
    done = pushed(hub, tmp_path, HF_TOKEN="")
    assert done.returncode == 1
    assert "there is none" in done.stdout
    assert hub.asked == []
