"""A hub that does not answer costs seconds, once; what is cached is found without it, and a network that is back is used."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, get_session, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

from engine.errors import DataError, ModelError
from engine.hub import Commits, reaching_hub


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An address of this machine that nobody listens at, as the hub; an empty cache."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return address


class Silent(http.server.BaseHTTPRequestHandler):
    """A hub that has nothing; what it was asked is noted."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    Silent.asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield Silent.asked
        server.shutdown()


def download(where: Path, endpoint: str) -> str:
    return hf_hub_download("nobody/nothing", "config.json", cache_dir=where, endpoint=endpoint)


def test_without_an_answer_the_client_gives_up_at_once(nowhere, tmp_path):
    begun = time.monotonic()
    with reaching_hub("nobody/nothing"), pytest.raises(LocalEntryNotFoundError):
        download(tmp_path, nowhere)
    # The client alone would try six times, with pauses of a second and more between them, 31 s in all.
    assert time.monotonic() - begun < 10


def test_a_hub_that_lets_one_wait_has_a_few_seconds(monkeypatch, tmp_path):
    monkeypatch.setattr("engine.hub.PATIENCE", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        begun = time.monotonic()
        with reaching_hub("nobody/nothing"), pytest.raises(LocalEntryNotFoundError):
            download(tmp_path, address)
        assert time.monotonic() - begun < 8  # the client alone waits ten seconds, six times


def test_what_is_in_the_cache_is_found_without_a_network(nowhere, tmp_path):
    commit = "0" * 40
    folder = tmp_path / "models--nobody--nothing"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit / "config.json").write_text(json.dumps({"model_type": "llama"}))
    begun = time.monotonic()
    with reaching_hub("nobody/nothing"):
        found = download(tmp_path, nowhere)
    assert json.loads(Path(found).read_text()) == {"model_type": "llama"}
    assert time.monotonic() - begun < 10


def test_a_hub_that_answers_is_used(hub):
    with reaching_hub("nobody/nothing"):
        answer = get_session().head(f"{constants.ENDPOINT}/nobody/nothing/config.json", timeout=5)
    assert answer.status_code == 404
    assert hub == ["/", "/nobody/nothing/config.json"]


def test_the_client_is_as_before_afterwards(nowhere):
    before = get_session().event_hooks
    with reaching_hub("nobody/nothing"):
        assert get_session().event_hooks != before
    assert get_session().event_hooks == before


@pytest.mark.parametrize("name", ["./folder", "/folder", "~/folder"])
def test_a_local_path_asks_nobody(hub, name):
    with reaching_hub(name):
        pass
    assert hub == []


def test_a_data_set_that_is_nowhere_is_one_sentence_in_seconds(nowhere, tmp_path, monkeypatch):
    import datasets

    from engine.data.hub_fetch import hub_rows

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", nowhere)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    begun = time.monotonic()
    with pytest.raises(DataError, match="as a data set on the hub it cannot be loaded") as caught:
        hub_rows("nobody/no-such-data", None)
    assert "without a network use a local file" in caught.value.hint
    assert time.monotonic() - begun < 20


def test_a_model_that_is_nowhere_is_one_sentence_in_seconds(nowhere):
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  no import is in what is measured

    from engine.features.load import load_model
    from engine.models.load import load_processing_class
    from engine.rules import read

    config = read({"version": 1, "model": {"name": "nobody/no-such-model"}}).config
    for load in (load_processing_class, load_model):
        begun = time.monotonic()
        with pytest.raises(ModelError, match="neither a folder here nor to be had from the hub"):
            load(config)
        # The client alone takes 31 s and more.
        assert time.monotonic() - begun < 25


def test_a_branch_becomes_its_commit_and_a_commit_is_asked_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "engine.hub._resolve_commit", lambda name, revision, kind: asked.append((revision, kind)) or kind[0] * 40
    )
    commits = Commits()
    assert commits.of("org/model", "branch") == "m" * 40
    assert commits.of("org/model", "b" * 40) == "b" * 40
    # A data set of the same name is another repository.
    assert commits.of("org/model", "branch", "dataset") == "d" * 40
    assert asked == [("branch", "model"), ("branch", "dataset")]
