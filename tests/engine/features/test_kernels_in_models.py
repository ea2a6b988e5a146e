"""Our kernels inside whole models: every family learns alike with them, under checkpoints, accumulation, DDP and adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.engine.features.families import FAMILIES, batches, curve, made, with_kernels

ROWS = batches(2, 4, 12)
FEW = ROWS[0][:2, :6]
"""In Triton's interpreter each program takes its time."""


def alike(ours, theirs, each, means):
    """Losses agree at every step, and their means over 20 steps more closely."""
    assert sum(ours[-4:]) / 4 < ours[0]
    apart = far(ours, theirs)
    assert apart[0] < each, apart
    assert apart[1] < means, apart


def far(ours, theirs):
    """How far losses are apart, at the step where it is most and as means over 20 steps."""
    parts = [[sum(x[i : i + 20]) for i in range(0, len(x), 20)] for x in (ours, theirs)]
    return tuple(max(abs(a / b - 1) for a, b in zip(*pair, strict=True)) for pair in ((ours, theirs), parts))


def in_turn(first):
    """Every other family by default, so that each is met with all weights or with adapters."""
    return [
        pytest.param(each, marks=pytest.mark.slow if place % 2 != first else ()) for place, each in enumerate(FAMILIES)
    ]


@pytest.mark.parametrize("family", in_turn(0))
def test_a_family_begins_to_learn_alike_with_kernels(family):
    alike(curve(family, True, 8), curve(family, False, 8), 1e-5, 1e-5)


@pytest.mark.parametrize("family", in_turn(1))
def test_adapters_of_a_family_begin_to_learn_alike_with_kernels(family):
    alike(*(curve(family, kernels, 8, adapters=True) for kernels in (True, False)), 1e-5, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_curves_of_200_steps_agree_with_and_without_kernels(family, adapters):
    # A router may take another expert where two are as good.
    near = (2e-3, 5e-4) if "moe" in family or family in ("mixtral", "gpt_oss") else (1e-3, 1e-4)
    alike(*(curve(family, kernels, adapters=adapters) for kernels in (True, False)), *near)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((each, torch.float32) for each in ("gemma2", "qwen3", "qwen3_moe", "qwen3_vl")),
        *((each, torch.bfloat16) for each in ("llama", "gemma3", "qwen3_moe", "qwen3_5")),
    ],
    ids=str,
)
def test_on_a_card_curves_of_200_steps_agree_with_and_without_kernels(family, dtype):
    """As near as they are, or three times as far as the model's own passes are from themselves over the same rows in another
    order: what a sum rounded otherwise becomes in 200 steps is the model's."""
    here = {"device": "cuda", "rows": 16, "dtype": dtype}
    plain, ours = curve(family, False, **here), curve(family, True, **here)
    each, means = (2e-2, 2e-3) if dtype is torch.float32 else (0.5, 5e-2)
    apart = far(ours, plain)
    if apart[0] >= each or apart[1] >= means:
        own = far(curve(family, False, flipped=True, **here), plain)
        each, means = max(each, 3 * own[0]), max(means, 3 * own[1])
    print(f"{family} {dtype}: {apart[0]:.1e} apart where it is most, {apart[1]:.1e} over 20 steps")
    alike(ours, plain, each, means)


IN_THE_INTERPRETER = """
import json
from tests.engine.features.families import curve
print(json.dumps(curve("qwen3", True, rows=1, length=6, num_hidden_layers=1)))
"""


@pytest.mark.slow
def test_the_kernels_themselves_learn_alike_over_200_steps_in_tritons_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    alike(json.loads(done.stdout), curve("qwen3", False, rows=1, length=6, num_hidden_layers=1), 1e-2, 1e-3)


UNDER_CHECKPOINTS = """
import sys, torch
from tests.engine.features.families import made, with_kernels
from tests.engine.features.test_kernels_in_models import FEW, gradients

family, dtype = sys.argv[1], getattr(torch, sys.argv[2])
truth = gradients(made(family).double(), False, rows=FEW)

def error(found):
    return max(float((found[name].double() - each).norm() / (each.norm() + 1e-6)) for name, each in truth.items())

allowed = 2 * error(gradients(made(family).to(dtype), False, rows=FEW)) + 1e-6
for reentrant in (None, True, False):
    model = with_kernels(made(family).to(dtype), family)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for parts in (1, 2):
        assert error(gradients(model, True, parts=parts, rows=FEW)) <= allowed, (reentrant, parts)
print("agree")
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5"])
def test_the_kernels_themselves_keep_every_gradient_under_both_checkpoints_and_accumulation(family, dtype):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", UNDER_CHECKPOINTS, family, dtype], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "agree"), done.stderr[-2000:]


def gradients(model, kernels, *, parts=1, rows=ROWS[0]):
    """Gradients of one batch, taken in so many parts of its rows."""
    model.zero_grad()
    more = {"fused_lm_head": True} if kernels else {}
    for part in rows.chunk(parts):
        (model(input_ids=part, labels=part, **more).loss / parts).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(ours, theirs):
    """In float64, but that norms and angles of the class are computed in float32."""
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_checkpoints_of_both_kinds_and_accumulation_change_no_gradient(reentrant, parts):
    theirs = gradients(made("qwen3").double(), False)
    model = with_kernels(made("qwen3").double(), "qwen3")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    same(gradients(model, True, parts=parts), theirs)


@pytest.mark.parametrize("saved", [None, ["lm_head"], ["q_norm", "lm_head"]])
def test_adapters_and_heads_trained_beside_them_get_the_same_gradients(saved):
    found = []
    for kernels in (False, True):
        model = made("qwen3", tie_word_embeddings=False).double()
        torch.manual_seed(2)
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=saved))
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        if kernels:
            with_kernels(model, "qwen3")
        found.append(gradients(wrapped.double(), kernels))
    assert any("lora_A" in name for name in found[0])
    assert (saved is None) == all("modules_to_save" not in name for name in found[0])
    same(found[1], found[0])


def test_two_runs_that_must_be_deterministic_have_one_curve():
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (curve("qwen3", True, 6) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert first == second


RANK = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.engine.features.families import batches, made, with_kernels
from tests.engine.features.test_kernels_in_models import gradients, same

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
model = with_kernels(made("qwen3").double(), "qwen3")
wrapped = DistributedDataParallel(model)
ids = batches(2, 4, 12)[0].chunk(2)[rank]
wrapped(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
found = {name: p.grad for name, p in model.named_parameters()}
same(found, gradients(made("qwen3").double(), False))
print("agrees")
"""


@pytest.mark.slow
def test_two_processes_under_ddp_get_the_gradients_of_one(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet")],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        out, err = rank.communicate()
        assert (rank.returncode, out.strip()) == (0, "agrees"), err[-2000:]
