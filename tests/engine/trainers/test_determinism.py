"""`run.full_determinism`: one curve for one seed, told in the receipt, and a run that cannot have it ends by name."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from trl import SFTTrainer

from engine.kernels.linear_logp import CUDA_WORKSPACE, workspace
from engine.trainers.table import METHODS
from tests.engine.trainers.conftest import CONVERSATIONS, lines
from tests.engine.trainers.test_matrix import settings

ON = {
    "run.full_determinism": True,
    "optim.max_steps": 2,
    "optim.gradient_accumulation_steps": 1,
    "kernels.use_cut_ce": True,
    "adapter.kind": "lora",
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Variables are set for the process and those that it starts; afterwards they are as they were."""
    names = (
        "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC",
        "FLASH_ATTENTION_DETERMINISTIC",
    )  # fmt: skip
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)


def curve(run):
    return [(event["loss"], event["grad_norm"]) for event in lines(run, "metrics") if "loss" in event]


def test_two_runs_with_one_seed_have_one_curve_under_deterministic_operations(train, source, monkeypatch):
    seen = []
    plain = SFTTrainer.training_step

    def training_step(self, *args, **kwargs):
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(SFTTrainer, "training_step", training_step)
    settings = {**ON, "adapter.lora_dropout": 0.1, "data.train": [{"path": source(CONVERSATIONS)}]}
    first, second = train(settings), train(settings)
    assert set(seen) == {(True, ":16:8")}
    assert len(curve(first)) == 2
    assert curve(first) == curve(second)
    (told,) = (e for e in lines(first, "receipt")[0]["entries"] if e["feature"] == "full determinism")
    assert (told["effective"], told["count"]) == ("on", 1)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
def test_two_runs_of_every_method_have_one_curve_and_the_same_weights(train, source, method):
    own = {name: value for name, value in ON.items() if not name.startswith("kernels")}
    dropout = 0.0 if method in ("dpo", "ipo", "kto", "reward") else 0.1  # these compare answers without
    given = {**settings(source, method, "lora"), **own, "adapter.lora_dropout": dropout, "optim.max_steps": 3}
    first, second = train(given), train(given)
    assert len(curve(first)) == 3
    assert curve(first) == curve(second)
    ours, theirs = (
        load_file(next(run.checkpoints.glob("checkpoint-*/adapter_model.safetensors"))) for run in (first, second)
    )
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_an_operation_without_a_deterministic_form_ends_the_run_by_its_name(train, source, monkeypatch):
    def training_step(self, *args, **kwargs):
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.use")

    monkeypatch.setattr(SFTTrainer, "training_step", training_step)
    run = train({**ON, "data.train": [{"path": source(CONVERSATIONS)}]}, code=1)
    (failed,) = lines(run, "failed")
    assert failed["message"] == (
        "run.full_determinism: cumsum_cuda_kernel has no deterministic form on this device. Set it to false."
    )


def test_the_size_of_products_does_not_depend_on_how_full_the_card_is(monkeypatch):
    card = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200 << 20, 80 << 30))
    assert workspace(card) == 50 << 20
    torch.use_deterministic_algorithms(True)
    try:
        assert workspace(card) == CUDA_WORKSPACE
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_card_two_runs_with_one_seed_have_one_curve(train, source):
    """Each in a process of its own, as runs are, side by side: at its first product torch notes for good what cuBLAS was told."""
    rows = [{"path": source(CONVERSATIONS)}]
    kernels = {"kernels.fused_attn_kernel": True, "kernels.torch_compile": True, "model.dtype": "bfloat16"}
    settings = {**ON, **kernels, "optim.max_steps": 8, "adapter.kind": "none", "data.train": rows}
    with ThreadPoolExecutor(2) as pool:
        runs = pool.map(lambda _: train(settings, apart=True), range(2))
    first, second = map(curve, runs)
    assert len(first) == 8
    assert first == second
