"""Trackers beside the run's own events, by transformers' callbacks: where they write, and what of them is in force."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.integrations.integration_utils import (
    CometCallback,
    MLflowCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)

from engine.config.tree import RunConfig
from engine.errors import redact
from engine.run.spawn import WANDB_KEY
from engine.trainers import comet

if TYPE_CHECKING:
    from engine.trainers.run_trainer import RunTrainer

FOLDER = "trackers"


def prepare(config: RunConfig, run: Path) -> None:
    """Tell the trackers, which read their places from the environment, to write below the run; what a person has set
    stays."""
    wanted = config.run.report_to
    if "tensorboard" in wanted:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run / FOLDER / "tensorboard"))
    if "wandb" in wanted:
        folder = run / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, value in (
            ("WANDB_DIR", str(folder)),
            ("WANDB_PROJECT", "workbench"),
            ("WANDB_NAME", run.name),
            ("WANDB_SILENT", "true"),
            # Code, requirements and console are the person's; a tracker of numbers asks for none of them.
            ("WANDB_DISABLE_CODE", "true"),
            ("WANDB_CONSOLE", "off"),
            ("WANDB_ERROR_REPORTING", "false"),
        ):
            os.environ.setdefault(name, value)
        if not _logged_in():
            os.environ.setdefault("WANDB_MODE", "offline")
    if "mlflow" in wanted:
        (run / FOLDER).mkdir(mode=0o700, exist_ok=True)
        _set(
            MLFLOW_TRACKING_URI=(run / FOLDER / "mlflow").as_uri(),
            MLFLOW_EXPERIMENT_NAME="workbench",
            # A folder of files is what needs no server and no database; MLflow wants to be told that it is meant.
            MLFLOW_ALLOW_FILE_STORE="true",
            MLFLOW_DISABLE_TELEMETRY="true",
        )
    if "trackio" in wanted:
        _set(TRACKIO_DIR=str(run / FOLDER / "trackio"))
        for elsewhere in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID"):
            os.environ.pop(elsewhere, None)  # the hub's token is gone before the first step
    if "comet" in wanted:
        folder = run / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        _set(COMET_OFFLINE_DIRECTORY=str(folder / "comet"), COMET_PROJECT_NAME="workbench")
        if not comet.logged_in():
            _set(COMET_START_ONLINE="0")


def _set(**values: str) -> None:
    """These variables, but for those that a person has set."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def entries(trainer: RunTrainer) -> list[dict[str, Any]]:
    """A row of the receipt for each tracker that hears of this training."""
    found = []
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback):
            found.append(("tensorboard", f"writes to {redact(str(callback.logging_dir))}"))
        elif isinstance(callback, WandbCallback):
            place = redact(os.environ.get("WANDB_DIR", "wandb"))
            offline = os.environ.get("WANDB_MODE") == "offline"
            found.append(("wandb", f"offline, in {place}; `wandb sync` sends it" if offline else "sent as it trains"))
        elif isinstance(callback, MLflowCallback):
            place = redact(os.environ.get("MLFLOW_TRACKING_URI", "mlruns"))
            found.append(("mlflow", f"writes to {place}; `mlflow ui --backend-store-uri` shows it"))
        elif isinstance(callback, TrackioCallback):
            place = redact(os.environ.get("TRACKIO_DIR", ""))
            found.append(("trackio", f"writes to {place}; `trackio show` with this TRACKIO_DIR shows it"))
        elif isinstance(callback, CometCallback):
            place = redact(os.environ.get("COMET_OFFLINE_DIRECTORY", ""))
            offline = os.environ.get("COMET_START_ONLINE", "").lower() in ("0", "false")
            found.append(("comet", f"offline, in {place}; `comet upload` sends it" if offline else "sent as it trains"))
    return [
        {"feature": f"tracker {name}", "requested": name, "effective": "on", "count": None, "detail": words}
        for name, words in found
    ]


def _logged_in() -> bool:
    """Whether Weights & Biases has a key: in the environment, or as its login leaves it."""
    if os.environ.get(WANDB_KEY):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
