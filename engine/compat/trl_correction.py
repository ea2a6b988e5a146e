"""TRL's importance sampling for answers of other weights, which it has for vLLM, over answers from elsewhere.

TRL 1.16 computes it in `_generate_and_score_completions`, from the log-probabilities that came with the answers, and weighs tokens
by it in `_compute_loss`, both where `use_vllm` and `vllm_importance_sampling_correction` are set. Nothing else that is called
inside asks for these two while answers come from a `_generate_single_turn` of ours; a test fails by name when that changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Correcting(Protocol):
    """A GRPOTrainer, as far as it is asked here."""

    use_vllm: bool
    vllm_importance_sampling_correction: bool


@contextlib.contextmanager
def correcting(trainer: Correcting) -> Iterator[None]:
    """Inside, this trainer weighs answers by how much likelier they are now than when they were sampled."""
    before = trainer.use_vllm, trainer.vllm_importance_sampling_correction
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    try:
        yield
    finally:
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = before
