"""A server on the loopback that speaks what is used of the hub's protocol to read data sets: commits, listings, parts of files.

It can go wrong on request: drop a connection in the middle of an answer, stall, or refuse.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


class DataHub(ThreadingHTTPServer):
    """Data sets by name, each a list of commits, the last one its main branch; each commit its files by path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sets: dict[str, list[dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.asked: list[tuple[str, str, str]] = []
        """Method, path and range of each request."""
        self.drops, self.stalls = 0, 0.0
        """So many of the next parts of files break off in their middle; seconds that each of them waits before."""

        self.trouble, self.slow = False, 0.0
        """Whether questions about sets are answered with an error, after so many seconds."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, name: str, files: dict[str, bytes]) -> str:
        """A new commit with these files; its hash."""
        self.sets.setdefault(name, []).append(files)
        return commit(name, len(self.sets[name]) - 1)

    def parts(self) -> list[tuple[str, int, int]]:
        """File, first and last byte of each part that was asked for."""
        found = []
        for method, path, part in self.asked:
            if method == "GET" and part:
                first, last = part.removeprefix("bytes=").split("-")
                found.append((path.rpartition("/")[2], int(first), int(last)))
        return found


def commit(name: str, number: int) -> str:
    return hashlib.sha1(f"{name} {number}".encode()).hexdigest()


@contextmanager
def data_hub() -> Iterator[DataHub]:
    with DataHub() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: DataHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""

    def do_any(self) -> None:
        hub, path = self.server, unquote(self.path.partition("?")[0])
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append((self.command, path, self.headers.get("Range") or ""))
        words = path.strip("/").split("/")
        if words == [""]:
            self._json({})
        elif words[:2] == ["api", "datasets"] and self._in_trouble():
            self._refuse(503, "Unavailable")
        elif words[:2] == ["api", "datasets"]:
            self._api("/".join(words[2:4]), words[4:], body)
        elif words[0] == "datasets" and words[3:4] == ["resolve"]:
            self._file("/".join(words[1:3]), words[4], "/".join(words[5:]))
        else:
            self._refuse(404, "EntryNotFound")

    do_GET = do_HEAD = do_POST = do_any

    def _in_trouble(self) -> bool:
        if self.server.trouble:
            time.sleep(self.server.slow)
        return self.server.trouble

    def _found(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit that a revision means, and its files; None once it is answered that there is none."""
        commits = self.server.sets.get(name)
        if commits is None:
            self._refuse(401, "RepoNotFound")
            return None
        known = {commit(name, number): files for number, files in enumerate(commits)}
        last = commit(name, len(commits) - 1)
        found = last if revision == "main" else revision
        if found not in known:
            self._refuse(404, "RevisionNotFound")
            return None
        return found, known[found]

    def _api(self, name: str, words: list[str], body: bytes) -> None:
        found = self._found(name, words[1] if len(words) > 1 else "main")
        if found is None:
            return
        sha, files = found
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ]
        folders = {path.rpartition("/")[0] for path in files if "/" in path}
        entries += [{"type": "directory", "path": folder, "size": 0, "oid": "0" * 40} for folder in folders]
        if words[:1] == ["tree"]:
            below = "/".join(words[2:])
            deep = "recursive=true" in self.path.lower()
            chosen = [
                entry for entry in entries
                if (entry["path"].startswith(f"{below}/") if deep and below else deep or entry["path"].rpartition("/")[0] == below)
            ]  # fmt: skip
            self._json(chosen) if chosen or not below else self._refuse(404, "EntryNotFound")
        elif words[:1] == ["paths-info"]:
            wanted = [unquote(each.partition("=")[2]) for each in body.decode().split("&") if each.startswith("paths=")]
            wanted = wanted or json.loads(body).get("paths", [])
            self._json([entry for entry in entries if entry["path"] in wanted])
        else:
            self._json({"id": name, "sha": sha, "siblings": [{"rfilename": path} for path in files], "tags": []})

    def _file(self, name: str, revision: str, path: str) -> None:
        found = self._found(name, revision)
        if found is None:
            return
        sha, files = found
        if name in self.server.gated:
            self._refuse(403, "GatedRepo")
        elif path not in files:
            self._refuse(404, "EntryNotFound")
        else:
            self._part(sha, files[path])

    def _part(self, sha: str, content: bytes) -> None:
        hub, part, code = self.server, self.headers.get("Range"), 200
        whole = len(content)
        if part and self.command == "GET":
            first, _, last = part.removeprefix("bytes=").partition("-")
            content, code = content[int(first) : int(last) + 1 if last else None], 206
            if hub.stalls:
                time.sleep(hub.stalls)
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", sha)
        self.send_header("Accept-Ranges", "bytes")
        if code == 206:
            self.send_header("Content-Range", f"bytes {part.removeprefix('bytes=')}/{whole}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if code == 206 and hub.drops:
            hub.drops -= 1
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(content)

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, code: int, reason: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", reason)
        self.send_header("X-Error-Message", reason)
        self.send_header("Content-Length", "0")
        self.end_headers()
