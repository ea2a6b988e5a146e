"""Which features change the built model and trainer of a run, in which order, and what each of them really did.

Every feature is a function that looks at the config and the instances, changes instances alone, and returns `Applied`:
what was asked for, what is in force, on how many modules, and how to take it back. Library modules and globals stay as
they are, so two runs in one process do not meet. A feature that was asked for and touched nothing raises before the first
step; a feature that has nothing to act on in this method says so in words.

Order: `on_model` before the trainer is built (what wraps layers), `on_trainer` after it (TRL has given the model its head
by then).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Applied:
    """One feature, as the receipt tells it. `undo` takes it back from the instances."""

    feature: str
    requested: Any
    effective: Any
    count: int | None
    detail: str
    undo: Callable[[], None] = lambda: None

    def entry(self) -> dict[str, Any]:
        """The receipt's entry."""
        return {name: getattr(self, name) for name in ("feature", "requested", "effective", "count", "detail")}


class Patches:
    """The features of one run, applied in order and taken back in the reverse order."""

    def __init__(
        self,
        config: Any,
        folder: Path,
        why: Mapping[str, str] | None = None,
        listen: Callable[[], None] = lambda: None,
    ) -> None:
        """`why` has by path the reasons of what was chosen, of settings that were `auto`; `listen` is called in between by
        what takes long, and raises Cancelled where the run is to stop."""
        self.config, self.folder, self.why, self.listen = config, folder, dict(why or {}), listen
        self.applied: list[Applied] = []
        self._undo: list[Callable[[], None]] = []
        self._offloading: Any = None

    def on_model(self, model: Any) -> None:
        """Features of the model itself. Raises ModelError for one that was asked for and cannot act on this model."""
        from engine.memory.tiers import POLICIES, use_tier
        from engine.patches import documents, norms, tiled
        from engine.patches.walks import put_checkpoints_aside

        base = model.get_base_model() if hasattr(model, "peft_config") else model
        self._undo.append(put_checkpoints_aside(base))
        self._undo.append(norms.raise_norms(self.config, model))
        if (tier := self.config.memory.gradient_checkpointing) in POLICIES:
            self._undo.append(use_tier(base, tier))
        self._add(tiled.tiled_mlp(self.config, base))
        self._add(documents.documents_apart(self.config, base))
        if self.config.memory.layer_offloading:
            from engine.patches.layer_offload import LayerOffloading

            self._offloading = LayerOffloading()
            self._undo.append(self._offloading.undo)
            self._offloading.on_model(model)

    def on_trainer(self, trainer: Any) -> None:
        """Features that need the trainer. Raises ModelError as above."""
        from engine.patches import (
            attention,
            compiled,
            compose,
            evaluation,
            head,
            norms,
            offload,
            padded,
            rounding,
            scores,
            tuning,
        )
        from engine.patches.fp8_base import fp8_base
        from engine.patches.lora import fused_lora
        from engine.patches.walks import walk_once

        scores.refuse_other_scores(trainer)
        self._add(padded.padding_behind(self.config, trainer))
        self._add(norms.fp32_norms(self.config, trainer))
        self._add(rounding.quantization_aware(self.config, trainer))
        # On layers as they compute from here on; what is left at auto is on or off afterwards.
        self.config, timed = compose.compose(self.config, trainer, self.folder, self.listen)
        self._add(timed)
        self._add(head.cut_cross_entropy(self.config, trainer))
        self._add(attention.fused_attention(self.config, trainer))
        self._add(fused_lora(self.config, trainer))
        self._add(tuning.tiles_by_timing(self.config, trainer))
        self._add(offload.activation_offloading(self.config, trainer, self.folder))
        self._add(evaluation.bf16_full_eval(self.config, trainer))
        self._add(compiled.torch_compile(self.config, trainer, self.why.get("kernels.torch_compile")))
        self._add(fp8_base(self.config, trainer))
        if self._offloading is not None:
            # Around everything else that changed how a layer is called.
            self._add(self._offloading.on_trainer(trainer))
        self._undo.append(walk_once(trainer))

    def entries(self) -> list[dict[str, Any]]:
        """Entries for the receipt."""
        return [each.entry() for each in self.applied]

    def undo(self) -> None:
        """Takes everything back."""
        while self._undo:
            self._undo.pop()()

    def _add(self, applied: Applied | None) -> None:
        if applied is not None:
            self.applied.append(applied)
            self._undo.append(applied.undo)
