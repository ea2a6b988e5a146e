"""Progress of a long task as one line on stderr; silent where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.figures import doing
from workbench.cli.output import rewrite


def on_stderr(state: Mapping[str, Any]) -> None:
    """Show `what: done of total`, over the line before."""
    rewrite(doing(state))
