"""Where what is kept between runs lies on this machine. Imports nothing of the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import platformdirs

NAME = "finetuning-workbench"


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of all that is kept: `WORKBENCH_CACHE`, else the project's in the user's cache."""
    named = environment.get("WORKBENCH_CACHE")
    return Path(named or platformdirs.user_cache_dir(NAME)).expanduser().absolute()


def compiled(what: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for code that `triton` or `inductor` compiled: one user's alone, who would run what another has put there. In a
    folder that is named, which several users may share, it has the user's number."""
    own = f"{what}-{os.getuid()}" if environment.get("WORKBENCH_CACHE") else what
    return user_cache(environment) / own
