"""The model hub, asked once whether it answers: without a network a cached model loads at once, and an error is told at once.

The hub's client tries every file six times with pauses between, which for a model that is nowhere adds up to a minute; it
has no setting for that. One quick question to the hub goes first. Where no answer comes, the client's own session refuses
to try within the block, as in its offline mode: libraries then look at what is here. The session is put back after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from engine.errors import DataError, ModelError, visible

COMMIT = re.compile(r"[0-9a-f]{40}")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
PATIENCE = 3.0
"""Seconds that the hub has for an answer, each of two times."""


@contextlib.contextmanager
def reaching_hub(name: str) -> Iterator[None]:
    """Load the model, tokenizer or data set `name` inside; a local path is not asked for. Raises what the libraries do."""
    if is_local(name):
        yield
        return
    from huggingface_hub import get_session

    session = get_session()
    if answers(session):
        yield
        return
    hooks = session.event_hooks
    session.event_hooks = {**hooks, "request": [_refuse]}
    try:
        yield
    finally:
        session.event_hooks = hooks


def answers(session: Any) -> bool:
    """Whether the hub says anything at all, through the proxies and certificates of its own client."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    for _ in range(2):
        try:
            session.head(constants.ENDPOINT, timeout=PATIENCE, follow_redirects=False)
        except transport_error(session):
            continue
        except OfflineModeIsEnabled:
            return False
        return True
    return False


def transport_error(session: Any = None) -> type[Exception]:
    """What the hub's client raises where no answer comes, which is no OSError: its library is httpx or its successor,
    depending on the hub's version."""
    from huggingface_hub import get_session

    library = sys.modules[type(session or get_session()).__module__.partition(".")[0]]
    return cast("type[Exception]", library.TransportError)


class Commits:
    """Which commit each hub name means in this process: asked once, kept in a run's `commits.json`, and taken from there when
    the run goes on, whatever the name has come to mean since."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self._write: Callable[[str], None] | None = None

    def keep(self, content: bytes | None, write: Callable[[str], None]) -> None:
        """Takes up what a run's file holds, None where it has none; what is asked from now on goes through `write`."""
        self._write, self.known = write, {}
        if content is not None:
            try:
                self.known = {name: commit for name, commit in json.loads(content).items()}
            except (ValueError, AttributeError, RecursionError):
                self.known = {"": ""}
            if not all(isinstance(each, str) and COMMIT.fullmatch(each) for each in self.known.values()):
                raise ModelError("commits.json: is damaged: it must name a commit for each model.", "Start a new run.")

    def of(self, name: str, revision: str | None, kind: str = "model") -> str | None:
        """The commit of a branch or tag of a `model` or a `dataset`; the revision itself where it is a commit, or where nothing
        here or there knows."""
        if is_local(name) or (revision is not None and COMMIT.fullmatch(revision)):
            return revision
        key = f"{'' if kind == 'model' else f'{kind}s/'}{name}@{revision or 'main'}"
        if key not in self.known and (commit := _resolve_commit(name, revision, kind)) is not None:
            self.known[key] = commit
            if self._write is not None and int(os.environ.get("RANK", "0")) == 0:
                self._write(json.dumps(self.known, indent=1))
        return self.known.get(key, revision)


COMMITS_FILE = "commits.json"
"""Where a run notes the commits of its models."""

COMMITS = Commits()
"""Of this process: a model, its tokenizer and its frozen copy are one commit."""


def commit_of(name: str, revision: str | None = None, kind: str = "model") -> str | None:
    """What to load `name` at: a commit for a name of the hub, else the revision as it is. Within `reaching_hub`."""
    return COMMITS.of(name, revision, kind)


def is_repository(name: str) -> bool:
    """Whether a name is one that a repository of the hub can have, as owner/name."""
    return bool(REPOSITORY.fullmatch(name)) and ".." not in name and "--" not in name


def is_local(name: str) -> bool:
    """Whether a name is a path and no name of the hub."""
    return name.startswith((".", "/", "~", "builtin/")) or Path(name).exists()


def snapshot(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder in the hub's cache with the files of these patterns, fetched where they are not here. Raises as its client does."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    asked: dict[str, Any] = {"revision": revision, "allow_patterns": list(patterns)}
    try:
        return Path(snapshot_download(name, **asked))
    except (OfflineModeIsEnabled, transport_error()):
        # Before 2.2 its client looks into its cache for a branch, and for a commit asks the hub what files it has.
        with contextlib.suppress(LocalEntryNotFoundError):
            return Path(snapshot_download(name, local_files_only=True, **asked))
        raise


def _resolve_commit(name: str, revision: str | None, kind: str) -> str | None:
    """The commit by the hub, or by its cache where the hub does not answer. Raises `DataError` or `ModelError` where the hub
    answers, but neither it nor the cache tells: what was loaded then would be nobody knows which version."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    trouble = ""
    try:
        if commit := HfApi().repo_info(name, revision=revision, repo_type=kind, timeout=PATIENCE * 3).sha:
            return str(commit)
    except OfflineModeIsEnabled:
        pass  # nobody was asked
    except HfHubHTTPError as problem:
        # That there is no such name, or that it may not be read, the libraries tell when they load it.
        if problem.response is not None and problem.response.status_code >= 500:
            trouble = f"error {problem.response.status_code}"
    except transport_error():
        trouble = "no answer in time"
    except OSError:
        pass
    least = ["config.json" if kind == "model" else "README.md"]
    with contextlib.suppress(OSError, LocalEntryNotFoundError):
        folder = Path(
            snapshot_download(name, revision=revision, repo_type=kind, local_files_only=True, allow_patterns=least)
        )
        if COMMIT.fullmatch(folder.name):
            return folder.name
    if trouble:
        message = f"the hub does not tell which commit {visible(revision or 'main')} of it is ({trouble})"
        todo = "Try again later, or name a commit as its revision."
        raise (
            DataError(message, todo, path=visible(name))
            if kind == "dataset"
            else ModelError(f"{visible(name)}: {message}", todo)
        )
    return None


def _refuse(request: Any) -> None:
    from huggingface_hub.errors import OfflineModeIsEnabled

    raise OfflineModeIsEnabled(f"the hub does not answer ({request.url.host})")
