"""Tokenizers of the shared data, and configs that name one source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.method import METHODS
from tests.caches import own_cache


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))


@pytest.fixture(scope="session")
def minimind(shared_data: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / "tokenizers/minimind")


@pytest.fixture(scope="session")
def phi(shared_data: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / "tokenizers/phi-3-mini")


@pytest.fixture(scope="session")
def gpt2(shared_data: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / "tokenizers/gpt2")


@pytest.fixture(scope="session")
def templates(shared_data: Path, minimind: Any, phi: Any) -> dict[str, tuple[Any, str]]:
    """Name to (tokenizer, template): those of the tokenizers, and two more rendered through minimind's."""
    found = {"minimind": (minimind, minimind.chat_template), "phi-3": (phi, phi.chat_template)}
    for name in ("qwen2.5", "qwen3"):
        text = (shared_data / f"tokenizers/chat-templates/{name}_tokenizer_config.json").read_text("utf-8")
        found[name] = (minimind, json.loads(text)["chat_template"])
    return found


@pytest.fixture
def make_config() -> Callable[..., Any]:
    """A config of the sections that data reads."""

    def make(
        path: Any = None, *, method: str = "sft", model: dict[str, Any] | None = None, source: Any = None, **data: Any
    ) -> Any:
        from engine.config.data import Data, DataSource
        from engine.config.model import Model

        train = source if source is not None else [DataSource(path=str(path))]
        return SimpleNamespace(
            method=METHODS[method].model_construct(),
            model=Model(name="test", **(model or {})),
            data=Data(train=train, **data),
            run=SimpleNamespace(seed=1),
        )

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Rows (or text, or bytes) to a file."""

    def write(content: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, "utf-8")
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in content), "utf-8")
        return path

    return write
