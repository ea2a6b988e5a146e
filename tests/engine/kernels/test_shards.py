"""A head cut by words over processes gives the scores and gradients of the whole one."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from engine.kernels.linear_logp import linear_logp_reference, shards
from engine.kernels.linear_logp.passes import backward_pass
from engine.kernels.linear_logp.shards import combine, linear_logp_sharded, shard_statistics
from engine.kernels.linear_logp.tiles import Scaling, Upstream

SETTINGS = {"temperature": 0.7, "soft_cap": 5.0, "logit_scale": 1.3, "label_smoothing": 0.1, "z_loss": 1e-2}


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=dtype) for n in (6, 53))
    bias = torch.randn(53, generator=generator, dtype=dtype)
    return [x.requires_grad_() for x in (hidden, weight, bias)], torch.tensor([0, 20, 21, 40, 52, 7])


def truth():
    """Scores and gradients of the whole head, under one upstream gradient for each score."""
    (hidden, weight, bias), targets = inputs()
    scores = linear_logp_reference(hidden, weight, targets, bias=bias, **SETTINGS)
    chosen = scores.log_probs, scores.entropy, scores.cross_entropy
    upstream = upstream_of(chosen)
    torch.autograd.backward(chosen, upstream)
    return [x.detach() for x in chosen], [x.grad for x in (hidden, weight, bias)]


def upstream_of(scores):
    return [torch.linspace(-1, 1 + i, x.numel(), dtype=x.dtype) for i, x in enumerate(scores)]


@pytest.mark.parametrize("borders", [(0, 53), (0, 21, 53), (0, 1, 20, 21, 53)])
def test_statistics_of_uneven_shards_combine_to_those_of_the_whole(borders):
    (hidden, weight, bias), targets = inputs()
    scaling = Scaling(**SETTINGS)
    parts = [slice(a, b) for a, b in pairwise(borders)]
    with torch.no_grad():
        stacked = [shard_statistics(hidden, weight[p], bias[p], targets, scaling, p.start, 1 << 10) for p in parts]
        lse, entropy, target, mean = combine(torch.stack(stacked), 53)
    scores, gradients = truth()
    loss = lse - 0.9 * target - 0.1 * mean + 1e-2 * lse.square()
    for ours, theirs in zip((target - lse, entropy, loss), scores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    upstream = Upstream(*upstream_of(scores))
    found = [
        backward_pass(
            hidden.detach(), weight[p].detach(), bias[p].detach(), targets, lse, entropy, upstream, scaling,
            torch.float64, 1 << 10, (True, True, True), first=p.start, vocabulary=53,
        )
        for p in parts
    ]  # fmt: skip
    together = sum(each.hidden for each in found), *(torch.cat([each[i] for each in found]) for i in (1, 2))
    for ours, theirs in zip(together, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


RANK = """
import sys, torch, torch.distributed as dist
from engine.kernels.linear_logp.shards import linear_logp_sharded
from engine.kernels.linear_logp.tiles import Scaling
from tests.engine.kernels.test_shards import SETTINGS, inputs, truth, upstream_of

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
(hidden, weight, bias), targets = inputs()
part = (slice(0, 21), slice(21, 53))[rank]
weight, bias = (x.detach()[part].requires_grad_() for x in (weight, bias))
found = linear_logp_sharded(hidden, weight, targets, dist.group.WORLD, bias=bias, scaling=Scaling(**SETTINGS))
chosen = found.log_probs, found.entropy, found.cross_entropy
torch.autograd.backward(chosen, upstream_of(chosen))
scores, (d_hidden, d_weight, d_bias) = truth()
pairs = zip((*chosen, hidden.grad, weight.grad, bias.grad), (*scores, d_hidden, d_weight[part], d_bias[part]))
for ours, theirs in pairs:
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
print("agrees")
"""


@pytest.fixture
def alone(tmp_path):
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("wrong", [53, -1])
def test_a_target_in_no_shard_is_no_number(alone, monkeypatch, wrong):
    (hidden, weight, bias), targets = inputs()
    targets[2] = wrong
    with pytest.raises(IndexError, match="outside of the vocabulary of 53 words"):
        linear_logp_sharded(hidden, weight, targets, alone, bias=bias)
    # A card is not waited for: the row becomes NaN there, and no other row.
    monkeypatch.setattr(shards, "kernel_serves", lambda *tensors: True)
    found = linear_logp_sharded(hidden, weight, targets, alone, bias=bias)
    for scores in (found.log_probs, found.entropy, found.cross_entropy):
        assert scores.isnan().tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": torch.zeros(6)}, "linear_logp_sharded: targets must be int64 on cpu; got float32"),
        ({"weight": torch.zeros(0, 8)}, "a vocabulary of at least one word"),
        ({"hidden": torch.zeros(6, 9)}, r"must get hidden \[N, H\]"),
        ({"scaling": Scaling(temperature=0.0)}, "temperature must be above 0"),
    ],
)
def test_a_shard_refuses_what_the_whole_head_does(change, words):
    (hidden, weight, _), targets = inputs()
    given = {"hidden": hidden, "weight": weight, "targets": targets, **change}
    with pytest.raises(ValueError, match=words):
        linear_logp_sharded(group=None, **given)


@pytest.mark.slow
def test_two_processes_with_half_a_head_each_agree_with_the_whole(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet")], env=dict(os.environ),
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        out, err = rank.communicate()
        assert (rank.returncode, out.strip()) == (0, "agrees"), err[-2000:]
