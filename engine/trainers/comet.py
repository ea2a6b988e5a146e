"""Comet beside the run's own events: told to log nothing of the machine and the code before it is imported, which transformers
does as it is imported itself. No transformers, no torch.
"""

from __future__ import annotations

import os
import sys

PACKAGE = "comet_ml"
_QUIET = {
    **dict.fromkeys(
        ("COMET_AUTO_LOG_CLI_ARGUMENTS", "COMET_AUTO_LOG_CODE", "COMET_AUTO_LOG_ENV_DETAILS", "COMET_AUTO_LOG_ENV_HOST",
         "COMET_AUTO_LOG_FIGURES", "COMET_AUTO_LOG_GIT_METADATA", "COMET_AUTO_LOG_GIT_PATCH", "COMET_ERROR_TRACKING_ENABLE"),
        "false",
    ),
    "COMET_AUTO_LOG_OUTPUT_LOGGER": "",  # a name of a logger, or none
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "COMET_DISPLAY_SUMMARY_LEVEL": "0",
    "COMET_LOGGING_CONSOLE": "ERROR",
}  # fmt: skip


def quiet() -> None:
    """Comet sends numbers alone: by itself it takes code, git patches, the console, the host's names and addresses, and wraps the
    calls of torch. What a person has set stays."""
    if PACKAGE in sys.modules:
        return  # withheld, or imported already
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def logged_in() -> bool:
    """Whether Comet has a key: in the environment, or in a file of its own."""
    from comet_ml.config import get_config

    return bool(get_config("comet.api_key"))
