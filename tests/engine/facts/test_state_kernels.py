"""Kernels for layers with a state: which models take them by transformers' sources, and where they do not serve."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from engine.facts.state_kernels import LINEAR, STATE_SPACE, unfit

H100, A100, B200 = (9, 0), (8, 0), (10, 0)


@pytest.mark.parametrize(
    ("model_type", "triton", "tilelang", "cards", "left_out"),
    [
        ("qwen3_5_moe_text", "3.6.0", None, [H100], "Triton here is 3.6.0"),
        ("olmo_hybrid", "3.7.0", None, [A100, H100], "Triton here is 3.7.0"),
        ("qwen3_next", "3.4.0+git1", None, [H100], "Triton here is 3.4.0"),
        ("qwen3_next", "3.6.0", "0.1.15", [H100], ""),
        ("qwen3_next", "3.3.1", None, [H100], ""),
        ("qwen3_next", "3.7.1", None, [H100], ""),
        ("qwen3_next", "3.10.0", None, [H100], ""),
        ("qwen3_next", "3.6.0", None, [A100, B200], ""),
        ("kimi_linear", "3.6.0", None, [H100], ""),
        ("kimi_linear", "3.7.1", "0.1.15", [], "for GPUs"),
    ],
)
def test_flash_linear_attention_is_left_out_where_it_would_raise(
    model_type: str, triton: str, tilelang: str | None, cards: list[tuple[int, int]], left_out: str
) -> None:
    reason = unfit(model_type, {"triton": triton, "tilelang": tilelang}, cards)
    assert left_out in reason
    assert bool(reason) == bool(left_out)


def test_the_models_that_take_a_packages_kernels_are_those_of_transformers_sources() -> None:
    """Those of the installed version: a newer one's may be listed already, none may be missing."""
    asking: dict[str, set[str]] = {"fla": set(), "mamba_ssm": set()}
    for source in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = source.read_text("utf-8")
        for package, models in asking.items():
            if re.search(rf'kernel_func_from_hub_with_fallback\(\s*"\w+",\s*"{package}"', text):
                models.add(source.parent.name)
    assert {"qwen3_5", "qwen3_5_moe", "qwen3_next"} <= asking["fla"] <= LINEAR
    assert {"mamba", "mamba2"} <= asking["mamba_ssm"] <= STATE_SPACE
