"""The benchmark of whole steps runs without a card: each case with its own weights, under its own name."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import transformers

from engine.config.tree import fields
from engine.data.gather_facts import gather_facts
from engine.hardware import parse_machine
from engine.kernels.experts.packed import PackedExperts
from engine.planning import memory_model
from tests.caches import own_cache

SCRIPT = Path(__file__).parents[2] / "benchmarks/whole_step.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_case_runs_and_no_figure_of_another_shape_takes_its_name(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    cases = ("step_8b_lora", "step_8b_lora_short", "step_06b_full")
    told = [
        *cases,
        "--arms",
        "plain",
        "cut",
        "none",
        "--rounds",
        "1",
        "--tokens",
        "64",
        "--check",
        "--results",
        results,
    ]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--shape", "tiny", "--seconds", "250", *told],
        env={**os.environ, "WORKBENCH_CACHE": own_cache(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MET" not in done.stdout
    rows = list(csv.DictReader(results.open()))
    impls = ("trl plain", "cut", "none")
    assert [(row["work"], row["impl"]) for row in rows] == [(f"{case}, tiny", impl) for case in cases for impl in impls]
    assert {row["shape"].split(";")[0] for row in rows} == {"4x64", "1x64"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("case", "shape", "arms"),
    [
        ("step_gptoss_20b_lora", "tiny gptoss", ("plain", "ours")),
        ("step_30b_a3b_lora_nf4", "tiny mixture", ("nf4 by default",)),
    ],
)
def test_arms_that_have_the_card_to_themselves_run_one_after_the_other(
    tmp_path: Path, case: str, shape: str, arms: tuple[str, ...]
) -> None:
    results = tmp_path / "results.csv"
    told = ["--arms", *arms, "--rounds", "1", "--window", "1", "--tokens", "64", "--check", "--results", results]
    done = subprocess.run(
        [sys.executable, SCRIPT, case, "--shape", shape, "--seconds", "250", *told],
        env={**os.environ, "WORKBENCH_CACHE": own_cache(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["impl"].removeprefix("trl ") for row in csv.DictReader(results.open())] == list(arms)


def test_an_arm_of_fp8_keeps_as_many_layers_as_its_goals_memory_takes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from step_estimates import Described
    from whole_step import ARMS, CASES

    assert {arm for case in CASES.values() for arm in case.arms} <= set(ARMS)
    case = CASES["step_8b_lora_fp8"]
    options = {"shape": "8b", "full": False, "rows": case.rows, "tokens": case.tokens, "ragged": False, "answer": 64}
    builder = Described(Namespace(**options, arms=list(case.arms)), "sft", tmp_path, None)
    need = {}
    for arm in case.arms:
        config = builder.config(arm)
        facts = gather_facts(config, machine=parse_machine("1xH100-80GB"), sources=False)
        for more in (0, -1):
            layers = config.memory.recompute_num_layers
            held = config.with_values({fields.memory.recompute_num_layers: layers and layers + more})
            sizes = memory_model.memory(held, facts, config.memory.gradient_checkpointing)
            need[arm, more] = sum((sizes or {}).values()) / 2**30
    goal = case.goals[0].gib or 0
    assert need["fp8 base", 0] < need["fp8 base, 28 again", 0] <= goal < need["fp8 base, 28 again", -1]
    assert need["fp8 base, none", 0] > goal


@pytest.mark.parametrize(("packed", "on_host"), [("", True), ("nf4", False), ("mxfp4", False)])
def test_random_bases_are_whole_and_packed_as_asked(
    packed: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from _random_base import random_base

    shape = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=128, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = random_base(transformers.AutoModelForCausalLM, shape, torch.float32, "cpu", packed, on_host=on_host)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    held = [weight for weight in model.parameters() if isinstance(weight, PackedExperts)]
    assert [weight.form.kind for weight in held] == [packed] * (4 if packed else 0)
    with torch.no_grad():
        for layer in model.model.layers:
            experts = layer.mlp.experts
            assert 0.015 < float(experts.gate_up_proj[0].std()) < 0.03
            assert not torch.equal(experts.gate_up_proj[0], experts.gate_up_proj[1])
    assert float(model.model.layers[0].input_layernorm.weight.mean()) == 1
