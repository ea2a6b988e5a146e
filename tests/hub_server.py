"""A hub on the loopback: what huggingface_hub asks of one to make a repository and send files, with failures on demand."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "a1B2" * 8
WHO = "me/model"
HANG, CUT = "hang", "cut"


class Hub(ThreadingHTTPServer):
    """One repository. `fails` holds (part of a path, what happens, how often): a status code, HANG or CUT midway."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.created: dict[str, Any] = {}
        self.private: bool | None = None
        """None while there is no repository."""
        self.files: dict[str, bytes] = {}
        """What the repository holds."""
        self.commits: list[list[str]] = []
        """The files of each commit."""
        self.large: dict[str, bytes] = {}
        self.fails: list[tuple[str, int | str, int]] = []
        self.released = threading.Event()
        """Ends what hangs."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self, home: object, *, patience: float = 2) -> dict[str, str]:
        """What a process needs to take this hub for the one there is."""
        return {
            "HF_ENDPOINT": self.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HOME": str(home), "WORKBENCH_HUB_PATIENCE": str(patience),
        }  # fmt: skip

    def fault(self, path: str) -> int | str | None:
        for place, (part, what, times) in enumerate(self.fails):
            if part in path:
                if times == 1:
                    del self.fails[place]
                else:
                    self.fails[place] = (part, what, times - 1)
                return what
        return None

    def handle_error(self, *_: object) -> None:
        pass  # a client that went away


class _Handler(BaseHTTPRequestHandler):
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
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        fault, length = hub.fault(path), int(self.headers.get("Content-Length") or 0)
        if fault == CUT:
            self.rfile.read(length // 2)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if fault == HANG:
            hub.released.wait(60)
            self.close_connection = True
        elif isinstance(fault, int):
            self.answer({"error": f"no right to write with {TOKEN}"}, fault)
        else:
            self.serve(hub, path, body)

    def serve(self, hub: Hub, path: str, body: bytes) -> None:
        if not path.startswith("/store/"):
            hub.tokens.add(self.headers.get("Authorization"))
        if path == "/api/repos/create":
            hub.created = json.loads(body)
            if hub.private is not None:
                self.answer({"error": "it is there", "url": f"{hub.address}/{WHO}"}, 409)
                return
            hub.private = bool(hub.created.get("private")) or hub.created.get("visibility") == "private"
            self.answer({"url": f"{hub.address}/{WHO}", "name": WHO})
        elif "/preupload/" in path:
            self.answer({"files": [
                {"path": each["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if each["path"].endswith((".safetensors", ".pt", ".pth")) else "regular"}
                for each in json.loads(body)["files"]
            ]})  # fmt: skip
        elif path.endswith("/info/lfs/objects/batch"):
            # As the hub does: what it has already is not asked for again.
            self.answer({"transfer": "basic", "objects": [
                {**each, "authenticated": True, **({} if each["oid"] in hub.large else
                 {"actions": {"upload": {"href": f"{hub.address}/store/{each['oid']}"}}})}
                for each in json.loads(body)["objects"]
            ]})  # fmt: skip
        elif path.startswith("/store/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/store/")
            hub.large[path.removeprefix("/store/")] = body
            self.answer({})
        elif "/commit/" in path:
            self.commit(hub, [json.loads(line) for line in body.splitlines()])
        elif path == "/api/validate-yaml":
            # Of a card's head the hub looks at the base among others.
            head = json.loads(body)["content"].partition("\n---")[0]
            named = [line.partition(":")[2].strip(' "') for line in head.splitlines() if line.startswith("base_model:")]
            wrong = [name for name in named if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)]
            told = {"errors": [{"message": f'"base_model" with value "{name}" is not valid.'} for name in wrong]}
            self.answer({**told, "warnings": []}, 400 if wrong else 200)
        elif path.startswith(f"/api/models/{WHO}") and hub.private is None:
            self.answer({"error": "Repository not found"}, 404)
        else:
            sha = f"{len(hub.commits):040x}"
            files = [{"rfilename": name} for name in hub.files]
            self.answer({"id": WHO, "private": hub.private, "sha": sha, "siblings": files})

    def commit(self, hub: Hub, lines: list[dict[str, Any]]) -> None:
        held = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                held[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                held[value["path"]] = hub.large[value["oid"]]
        hub.files |= held
        hub.commits.append(sorted(held))
        oid = f"{len(hub.commits):040x}"
        self.answer({"commitUrl": f"{hub.address}/{WHO}/commit/{oid}", "commitOid": oid})

    do_GET = do_POST = do_PUT = do_HEAD = handle_any


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub for as long as the block lasts."""
    server = Hub()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.released.set()
        time.sleep(0)
        server.shutdown()
        server.server_close()
