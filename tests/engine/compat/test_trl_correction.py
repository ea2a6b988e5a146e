"""TRL's importance sampling for answers of other weights: on inside alone, and asked for where we think it is."""

from __future__ import annotations

from types import SimpleNamespace

from trl import GRPOTrainer

from engine.compat.trl_correction import correcting

SWITCHES = {"use_vllm", "vllm_importance_sampling_correction"}


def test_it_is_on_inside_alone():
    trainer = SimpleNamespace(use_vllm=False, vllm_importance_sampling_correction=True)
    with correcting(trainer):
        assert trainer.use_vllm
    assert not trainer.use_vllm
    assert trainer.vllm_importance_sampling_correction


def test_upstream_trl_asks_for_it_where_answers_are_scored_and_in_the_loss():
    """What else is called there and asks for vLLM samples by it, and is overridden."""
    for name in ("_generate_and_score_completions", "_compute_loss"):
        assert set(getattr(GRPOTrainer, name).__code__.co_names) >= SWITCHES, name
    asking = {
        name
        for name, method in vars(GRPOTrainer).items()
        if "use_vllm" in getattr(method, "__code__", SWITCH_LESS).co_names
    }
    assert asking == {
        "__init__", "_compute_loss", "_generate", "_generate_and_score_completions", "_generate_single_turn", "_tool_call_loop",
    }  # fmt: skip


SWITCH_LESS = SimpleNamespace(co_names=())
