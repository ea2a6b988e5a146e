"""A tiny model and a meter of live memory for the features that change models."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.features.built import Built, Notes
from tests.engine.trainers.conftest import source, train  # noqa: F401  runs of the worker in this process


class Meter(TorchDispatchMode):
    """Bytes of tensors made inside, now and at their highest; storages count once and until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: set[int] = set()
        self._old: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What came in and was not made inside (weights, ids) is not counted, nor are views of it.
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in self._known:
                self._old.add(value.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._old:
            return
        self._known.add(key)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def built_of(trainer: Any, folder: Path = Path(), auto: str | None = None, **notes: Any) -> Built:
    """What a feature gets of a trainer of ours, or of whatever has a `model` as it does."""
    copy = getattr(trainer, "ref_model", None)
    by = "none" if not hasattr(trainer, "ref_model") or not getattr(trainer, "beta", 1) else "adapter_off"
    by = "copy" if copy is not None else "precomputed" if getattr(trainer, "precompute_ref_logps", False) else by
    return Built(
        policy=trainer.model, trainer=trainer, reference=copy, reference_by=by,
        shares_prompts=getattr(trainer, "shares_prompts", False), events=getattr(trainer, "writer", None),
        notes=Notes(folder, {} if auto is None else {"kernels.torch_compile": auto}, **notes),
    )  # fmt: skip


@pytest.fixture
def meter() -> Callable[[], Meter]:
    return Meter


def tiny_model(vocab: int = 128, layers: int = 2, **changes: Any) -> Any:
    """A Qwen3 of hidden 32 with random weights, the same each time."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": vocab, "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**{**shape, **changes}))
