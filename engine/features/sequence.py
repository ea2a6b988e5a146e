"""The features of one run: each acts on the built model and trainer in its turn, and all can be taken back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from engine.config.tree import RunConfig
from engine.features import auto_compose
from engine.features.applied import Applied
from engine.features.auto_compose.apply import compose
from engine.features.built import Built
from engine.features.cut_cross_entropy.scores import refuse_other_scores
from engine.features.table import FEATURES, Feature, name_of


class Features:
    """The features of one run, applied in order and taken back in the reverse order."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.applied: list[Applied] = []
        self._undo: list[Callable[[], None]] = []
        self._prepared: dict[str, Any] = {}

    def prepare(self, built: Built) -> None:
        """What acts on the policy before there is a trainer. Raises ModelError for what was asked for and cannot act."""
        for feature in FEATURES:
            act = getattr(_apply_module(feature), "prepare", None)
            if act is not None and (done := act(self.config, built)) is not None:
                self._prepared[name_of(feature)] = done
                self._add(done)

    def apply(self, built: Built) -> None:
        """What acts on the trainer and its models. Raises ModelError as above."""
        built = replace(built, prepared=self._prepared)
        refuse_other_scores(built)
        for feature in FEATURES:
            if feature is auto_compose:
                # What is left at auto is on or off afterwards.
                self.config, timed = compose(self.config, built)
                self._add(timed)
            elif (act := getattr(_apply_module(feature), "apply", None)) is not None:
                self._add(act(self.config, built))

    def entries(self) -> list[dict[str, Any]]:
        """Their rows of the receipt."""
        return [each.entry() for each in self.applied]

    def undo(self) -> None:
        """Takes everything back."""
        while self._undo:
            self._undo.pop()()

    def _add(self, done: Any) -> None:
        if done is None:
            return
        if hasattr(done, "entry"):
            self.applied.append(done)
        self._undo.append(done.undo if hasattr(done, "undo") else done)


def _apply_module(feature: Feature) -> ModuleType:
    return importlib.import_module(f"{feature.__name__}.apply")
