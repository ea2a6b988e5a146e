"""The model hub, asked once whether it answers: without a network a cached model loads at once, and an error is told at once.

The hub's client tries every file six times with pauses between, which for a model that is nowhere adds up to a minute; it
has no setting for that. One quick question to the hub goes first. Where no answer comes, the client's own session refuses
to try within the block, as in its offline mode: libraries then look at what is here. The session is put back after it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE = 3.0
"""Seconds that the hub has for an answer, each of two times."""


@contextlib.contextmanager
def reaching_hub(name: str) -> Iterator[None]:
    """Load the model, tokenizer or data set `name` inside; a local path is not asked for. Raises what the libraries do."""
    if name.startswith((".", "/", "~")) or Path(name).exists():
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

    # The client is httpx or its successor, depending on the hub's version.
    library = sys.modules[type(session).__module__.partition(".")[0]]
    for _ in range(2):
        try:
            session.head(constants.ENDPOINT, timeout=PATIENCE, follow_redirects=False)
        except library.TransportError:
            continue
        except OfflineModeIsEnabled:
            return False
        return True
    return False


def _refuse(request: Any) -> None:
    from huggingface_hub.errors import OfflineModeIsEnabled

    raise OfflineModeIsEnabled(f"the hub does not answer ({request.url.host})")
