"""A folder pushed to a hub by the hub's own client, which alone sees the token.

A hub that stops answering is an error after `PATIENCE` seconds: the client itself would wait without end. What was sent before
is known to the hub, so the same push again goes on from there.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import UsageError, WorkbenchError, first_line, redact, visible

Report = Callable[[str, int, int], None]
PATIENCE = float(os.environ.get("WORKBENCH_HUB_PATIENCE", "60"))
"""Seconds without any byte from or to the hub."""
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def refuse_name(name: str) -> None:
    """Raises UsageError for what is no `owner/name`."""
    if not NAME.fullmatch(name) or ".." in name or "--" in name:
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
    _bound()
    api = HfApi(token=token)
    try:
        report(f"Pushing to {name}", 0, 1)
        api.create_repo(name, private=private, exist_ok=True)
        made = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload model")
    except OfflineModeIsEnabled as problem:
        raise WorkbenchError("push: HF_HUB_OFFLINE forbids to reach the hub.", "Unset it.") from problem
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as problem:
        if isinstance(told := problem.__cause__ or problem.__context__, WorkbenchError):
            raise told from problem  # the client says of a file only that it did not arrive
        first = first_line(problem).replace(token, "[hidden]")
        raise WorkbenchError(
            f"push: the hub refused {visible(name)}: {visible(redact(first))[:300]}",
            "Look whether the token may write there, then push again.",
        ) from problem
    return str(made.commit_url)


def _bound() -> None:
    """Gives every request of the hub's client an end, and none a second try."""
    from huggingface_hub import get_session

    session: Any = get_session()
    # The client is httpx or its successor, depending on the hub's version.
    library: Any = sys.modules[type(session).__module__.partition(".")[0]]
    send = session.send

    def once(request: Any, **settings: Any) -> Any:
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), PATIENCE)
        try:
            return send(request, **settings)
        except library.TransportError as problem:
            host = visible(request.url.host)
            raise WorkbenchError(
                f"push: {host} did not answer within {PATIENCE:g} s ({type(problem).__name__}).",
                "Look at the network, then push again: files that arrived are not sent twice.",
            ) from problem

    session.send = once
