"""Continued pretraining on plain text: the loss and trainer of SFT, every token trained."""

from __future__ import annotations

from engine.trainers.sft import Sft, arguments, build

__all__ = ["Sft", "arguments", "build"]
