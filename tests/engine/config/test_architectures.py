"""What transformers' tables say of the classes that read images."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from engine.config import architectures
from engine.config.architectures import needs_torchvision


@pytest.mark.parametrize(
    ("release", "here", "needed"), [("5.17.0", False, True), ("5.17.0", True, False), ("5.18.0", False, False)]
)
def test_classes_that_older_releases_keep_from_pillow_need_torchvision_there(
    monkeypatch: pytest.MonkeyPatch, release: str, here: bool, needed: bool
) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, *more: Any) -> Any:
        return (object() if here else None) if name == "torchvision" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(architectures, "installed", lambda _: release)
    assert needs_torchvision("SmolVLMProcessor", "SmolVLMImageProcessor") is needed
    assert needs_torchvision("Qwen2VLProcessor", "Qwen2VLImageProcessor") is False
