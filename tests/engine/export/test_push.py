"""A push against a server on the loopback that speaks what is used of the hub's protocol, and one that stalls."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

TOKEN = "hf_" + "a1B2" * 8
CODE = (
    "import sys; from pathlib import Path; from engine.errors import WorkbenchError\n"
    "from engine.export.push import upload\n"
    "try: print(upload(Path(sys.argv[1]), 'me/model', private=True, report=lambda *_: None))\n"
    "except WorkbenchError as problem: print(problem.full_message); sys.exit(problem.exit_code)\n"
)


class Hub(ThreadingHTTPServer):
    """What was asked and sent, in order."""

    daemon_threads = True
    stalls, refuses = "", ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.commit: list[dict[str, Any]] = []
        self.large: dict[str, bytes] = {}
        self.created: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, value: Any, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        if hub.stalls and hub.stalls in path:
            time.sleep(30)
            return
        if hub.refuses and hub.refuses in path:
            self.answer({"error": f"no right to write with {TOKEN}"}, 403)
            return
        if not path.startswith("/store/"):
            hub.tokens.add(self.headers.get("Authorization"))
        if path == "/api/repos/create":
            hub.created = json.loads(body)
            self.answer({"url": f"{hub.address}/me/model", "name": "me/model"})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            kinds = [{"path": each["path"], "uploadMode": "lfs" if each["path"].endswith("safetensors") else "regular",
                      "shouldIgnore": False} for each in files]  # fmt: skip
            self.answer({"files": kinds})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            self.answer({"transfer": "basic", "objects": [
                {**each, "authenticated": True,
                 "actions": {"upload": {"href": f"{hub.address}/store/{each['oid']}"}}} for each in objects
            ]})  # fmt: skip
        elif path.startswith("/store/"):
            hub.large[path.removeprefix("/store/")] = body
            self.answer({})
        elif "/commit/" in path:
            hub.commit = [json.loads(line) for line in body.splitlines()]
            self.answer({"commitUrl": f"{hub.address}/me/model/commit/{'0' * 40}", "commitOid": "0" * 40})
        else:
            self.answer({"id": "me/model", "sha": "0" * 40, "siblings": []})

    do_GET = do_POST = do_PUT = do_HEAD = handle_any


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def pushed(hub: Hub, tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    environment = {
        **os.environ, "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HOME": str(tmp_path / "home"), "WORKBENCH_HUB_PATIENCE": "2", **more,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-P", "-c", CODE, str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_folder_arrives_whole(hub: Hub, tmp_path: Path) -> None:
    done = pushed(hub, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith(f"/me/model/commit/{'0' * 40}")
    assert hub.created.get("private") or hub.created.get("visibility") == "private", hub.created
    assert list(hub.large.values()) == [b"weights" * 1000]
    files = {line["value"]["path"]: line for line in hub.commit if line["key"] in ("file", "lfsFile")}
    assert base64.b64decode(files["config.json"]["value"]["content"]) == b'{"model_type": "llama"}'
    assert files["model.safetensors"]["value"]["oid"] in hub.large
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.parametrize("where", ["/api/repos/create", "/preupload/", "/store/", "/commit/"])
def test_a_hub_that_stalls_is_an_error_in_time(hub: Hub, tmp_path: Path, where: str) -> None:
    hub.stalls, begun = where, time.monotonic()
    done = pushed(hub, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "127.0.0.1 did not answer within 2 s" in done.stdout
    assert time.monotonic() - begun < 60
    assert sum(where in each for each in hub.asked) == 1, "it is asked once"


def test_a_refusal_does_not_show_the_token(hub: Hub, tmp_path: Path) -> None:
    hub.refuses = "/commit/"
    done = pushed(hub, tmp_path)
    assert done.returncode == 1
    assert "push: the hub refused me/model" in done.stdout
    assert TOKEN not in done.stdout + done.stderr


def test_without_a_token_nothing_is_asked(hub: Hub, tmp_path: Path) -> None:
    done = pushed(hub, tmp_path, HF_TOKEN="")
    assert done.returncode == 1
    assert "there is none" in done.stdout
    assert hub.asked == []
