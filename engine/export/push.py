"""A folder pushed to a hub by the hub's own client, which alone sees the token.

A hub that stops answering is an error after `PATIENCE` seconds: the client itself would wait without end. What was sent before
is known to the hub, so the same push again goes on from there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.errors import UsageError, WorkbenchError, first_line, redact, visible
from engine.hub import is_repository

Report = Callable[[str, int, int], None]
PATIENCE = float(os.environ.get("WORKBENCH_HUB_PATIENCE", "60"))
"""Seconds without any byte from or to the hub."""


class Unreachable(WorkbenchError):
    """The hub did not answer in time, or the connection to it was cut."""


def refuse_name(name: str) -> None:
    """Raises UsageError for what is no `owner/name`."""
    if not is_repository(name):
        raise UsageError(f"--to: must be the repository as owner/name; got {visible(name)[:100]}.")


def upload(folder: Path, name: str, *, private: bool, report: Report) -> str:
    """Makes the repository where there is none and uploads the folder; the address of the commit.

    Raises WorkbenchError where there is no token, the hub refuses, or does not answer in time.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    refuse_name(name)
    token = get_token()
    if not token:
        raise WorkbenchError(
            "push: the hub asks for a token, and there is none.", "Run `hf auth login`, or set HF_TOKEN."
        )
    bound()
    api = HfApi(token=token)
    try:
        report(f"Pushing to {name}", 0, 1)
        api.create_repo(name, private=private, exist_ok=True)
        made = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload model")
    except OfflineModeIsEnabled as problem:
        raise WorkbenchError("push: HF_HUB_OFFLINE forbids to reach the hub.", "Unset it.") from problem
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as problem:
        if (told := unreachable(problem)) is not None:
            raise told from problem  # the client says of a file only that it did not arrive
        raise WorkbenchError(
            f"push: the hub refused {visible(name)}: {reason(problem, token)}",
            "Look whether the token may write there, then push again.",
        ) from problem
    return str(made.commit_url)


def chain(problem: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came of."""
    while problem is not None:
        yield problem
        problem = problem.__cause__ or problem.__context__


def unreachable(problem: BaseException) -> Unreachable | None:
    """That the hub did not answer, where that is what an error of its client came of."""
    return next((each for each in chain(problem) if isinstance(each, Unreachable)), None)


def reason(problem: BaseException, token: str) -> str:
    """The first line of an error of the hub's client, without the token."""
    return visible(redact(first_line(problem).replace(token, "[hidden]")))[:300]


def bound(sent: Callable[[int], None] = lambda count: None) -> None:
    """Gives every request of the hub's client an end, and none a second try where no answer came (`Unreachable`); `sent` hears
    of the bytes of bodies as they go."""
    from huggingface_hub import get_session

    session: Any = get_session()
    # The client is httpx or its successor, depending on the hub's version.
    library: Any = sys.modules[type(session).__module__.partition(".")[0]]
    send = session.send

    class Counted(library.SyncByteStream):
        """A body whose bytes are counted."""

        def __init__(self, body: Any) -> None:
            self._body = body

        def __iter__(self) -> Iterator[bytes]:
            for piece in self._body:
                yield piece
                sent(len(piece))

        def close(self) -> None:
            self._body.close()

    def once(request: Any, **settings: Any) -> Any:
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), PATIENCE)
        if isinstance(request.stream, library.SyncByteStream):
            request.stream = Counted(request.stream)
        try:
            return send(request, **settings)
        except library.TransportError as problem:
            host, kind = visible(request.url.host), type(problem).__name__
            late = isinstance(problem, library.TimeoutException)
            what = f"did not answer within {PATIENCE:g} s" if late else "could not be reached, or cut the connection"
            raise Unreachable(
                f"push: {host} {what} ({kind}).",
                "Look at the network, then push again: files that arrived are not sent twice.",
            ) from problem

    session.send = once
