"""Each kernel agrees with its plain-torch reference: on CPU through the reference itself and Triton's interpreter."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.device import _card_serves, lacking, sums_in_float32
from engine.kernels.experts.launch import DECODED
from engine.kernels.experts.packed import KINDS, PLAIN
from engine.kernels.fp8_rows import rounded_rows, transposed
from engine.kernels.gated import gated, gated_gradients
from engine.kernels.linear_cross_entropy import linear_cross_entropy
from engine.kernels.linear_logp import linear_logp
from engine.kernels.logp_entropy import logp_entropy
from engine.kernels.logp_entropy.launch import wide
from engine.kernels.norm_rope import _sums, norm_rope
from engine.kernels.rope import rope
from tests.engine.kernels.kernel_cases import CHECKS, FAR, WIDE, check

CASES = Path(__file__).parent / "kernel_cases.py"
LONG = (
    "experts_registered", "rope_registered", "rope_views", "rope_twice", "gated_again", "gated_sums_tiles", "computed_again",
)  # fmt: skip
"""A third of the interpreter's time: ops as torch's registry calls them, and kernels once more on other strides."""


def run_cases(*parts: list[str], at_once: int = 10, **environment: str) -> int:
    """The cases of each part in a process of its own, `at_once` side by side: most of the time is compilation. All at once
    would fill a card that other tests are on. How many were right."""

    def run(names: list[str]) -> subprocess.CompletedProcess[str]:
        told = {**os.environ, **environment}
        return subprocess.run([sys.executable, str(CASES), *names], env=told, text=True, capture_output=True)

    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), at_once)) as pool:
        runs = list(pool.map(run, parts))
    said = [(each.stdout, each.stderr) for each in runs]
    bad = [line for out, _ in said for line in out.splitlines() if not line.startswith("ok")]
    assert not any(run.returncode for run in runs), "\n".join(bad) + "".join(err[-2000:] for _, err in said)
    return sum(out.count("ok ") for out, _ in said)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("", marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_kernels_match_float64_in_the_interpreter(dtype):
    """The cases of one number format, but for some that are long there, or all in every format."""
    some = [f"{name}:{dtype}" if name in WIDE else name for name in CHECKS if name not in LONG]
    told = {"PAIRWISE": "1"} if dtype else {}
    assert run_cases(some if dtype else list(CHECKS), TRITON_INTERPRET="1", **told) > 50


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_hundred_crosses_of_experts_match_float64_in_the_interpreter(seed):
    """Drawn over tokens, experts, widths, top-k, rank, format, routing, activation, layout, adapters and frozen weights."""
    assert run_cases(["experts_crosses"], TRITON_INTERPRET="1", CROSSES="100", SEED=seed) >= 100


PARTED = {
    "experts_cases:bfloat16": [{"AXES": names} for names in (
        "tokens experts hidden", "width top_k rank dtype routing", "activation gate transposed adapted trained",
    )],
    "experts_packed": [{"KIND": kind} for kind in KINDS],
    "experts_decoded": [{"KIND": kind} for kind in KINDS if kind in DECODED],
}  # fmt: skip
"""Cases that would take a card's host minutes, in parts that the environment names."""
ON_A_CARD = [
    pytest.param(case, part, id="-".join((case, *part.values())).replace(" ", ","))
    for case in (
        *(f"{name}:{dtype}" for name in WIDE for dtype in ("float32", "bfloat16", "float16")),
        *(name for name in CHECKS if name not in WIDE and name not in FAR),
    )
    for part in PARTED.get(case, [{}])
]


def checked_here(case: str, part: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: another one would import torch and open the card for as long as most cases take. What is wrong is told
    first, since logs are cut."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in part.items():
            patch.setenv(name, value)
        wrong = check([case])
    gc.collect()
    torch.cuda.empty_cache()
    told = capsys.readouterr().out
    assert not wrong, "\n".join((f"{len(wrong)} wrong:", *wrong))
    assert "ok " in told


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("case", "part"), ON_A_CARD)
def test_kernels_match_float64_on_the_gpu(case, part, capsys):
    if part.get("KIND", "fp8") not in PLAIN:
        pytest.importorskip("bitsandbytes")
    checked_here(case, part, capsys)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", FAR)
def test_kernels_reach_elements_2_to_the_31_apart_on_the_gpu(case, capsys):
    """Each takes up to 30 GiB of the card: one process has them, one after the other (`tests.conftest`)."""
    checked_here(case, {}, capsys)


def test_log_probabilities_and_entropy_are_those_of_torch_on_cpu():
    logits = torch.randn(2, 3, 11, dtype=torch.float64)
    targets = torch.randint(11, (2, 3))
    targets[1, 2] = -100
    logp, entropy = logp_entropy(logits, targets, temperature=2.0)
    distribution = torch.distributions.Categorical(logits=logits / 2)
    kept = targets >= 0
    torch.testing.assert_close(logp[kept], distribution.log_prob(targets.clamp(min=0))[kept])
    torch.testing.assert_close(entropy[kept], distribution.entropy()[kept])
    assert logp[1, 2] == 0
    assert entropy[1, 2] == 0


def test_loss_from_hidden_states_is_torch_cross_entropy_on_cpu():
    hidden, head = torch.randn(6, 8, dtype=torch.float64), torch.randn(13, 8, dtype=torch.float64)
    targets = torch.tensor([1, -100, 12, 0, -100, 5])
    torch.testing.assert_close(
        linear_cross_entropy(hidden, head, targets), F.cross_entropy(hidden @ head.T, targets, ignore_index=-100)
    )


@pytest.mark.parametrize(
    ("activation", "theirs"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu")]
)
def test_gated_activations_are_those_of_transformers_models(activation, theirs):
    ACT2FN = pytest.importorskip("transformers.activations").ACT2FN
    gate, up = (torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    slope, wanted = torch.randn(2, 9, 16, dtype=torch.float64), ACT2FN[theirs](gate) * up
    truth = torch.autograd.grad(wanted, (gate, up), slope)
    assert torch.autograd.gradcheck(lambda a, b: gated(a, b, activation), (gate, up))
    torch.testing.assert_close(gated(gate, up, activation), wanted)
    spent = [x.detach().clone() for x in (slope, gate, up)]
    found = gated_gradients(*spent, activation, with_product=True, in_place=True)
    assert [x.data_ptr() for x in found] == [x.data_ptr() for x in (spent[1], spent[2], spent[0])]
    for ours, right in zip(found, (*truth, wanted.detach()), strict=True):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("trained", [True, False])
def test_a_word_that_cannot_come_leaves_entropy_and_gradients_finite_on_cpu(trained):
    hidden, head = torch.randn(3, 8, dtype=torch.float64), torch.randn(13, 8, dtype=torch.float64)
    hidden.requires_grad_()
    head.requires_grad_(trained)
    closed = torch.zeros(13, dtype=torch.float64)
    closed[10:] = float("-inf")
    targets = torch.tensor([0, 9, 4])
    found = []
    for weight, bias in ((head, closed), (head[:10], None)):
        scores = linear_logp(hidden, weight, targets, bias=bias)
        leaves = [hidden, head] if trained else [hidden]
        found.append((*scores[:2], *torch.autograd.grad(scores.log_probs.sum() + scores.entropy.sum(), leaves)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rotation_keeps_the_norm_that_rms_norm_gives():
    q, k = torch.randn(1, 4, 2, 16, dtype=torch.float64), torch.randn(1, 4, 1, 16, dtype=torch.float64)
    angles = torch.randn(1, 4, 8, dtype=torch.float64).repeat(1, 1, 2)
    for rotated in norm_rope(q, k, None, None, angles.cos(), angles.sin(), eps=0.0):
        torch.testing.assert_close(rotated.square().mean(-1), torch.ones_like(rotated[..., 0]))


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (lambda: logp_entropy(torch.randn(2, 3), torch.zeros(3, dtype=torch.long)), "targets"),
        (lambda: linear_cross_entropy(torch.randn(2, 3), torch.randn(5, 4), torch.zeros(2).long()), "hidden"),
        (
            lambda: norm_rope(
                torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), None, None, torch.randn(1, 2, 5), torch.randn(1, 2, 5)
            ),
            "cos and sin",
        ),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused_by_name(call, place):
    with pytest.raises(ValueError, match=place):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda h, w, y: linear_logp(h.int(), w, y), "hidden must be float64.*got int32. Convert"),
        (lambda h, w, y: linear_logp(h, w.to(torch.float8_e4m3fn), y), "weight must be .*got float8_e4m3fn"),
        (lambda h, w, y: linear_logp(h, w, y.float()), "targets must be int64 on cpu; got float32 on cpu. Use .long"),
        (lambda h, w, y: linear_logp(h, w, y.to("meta")), "targets must be int64 on cpu; got int64 on meta"),
        (lambda h, w, y: linear_cross_entropy(h, w.to("meta"), y), "weight must lie on cpu as the others do; got meta"),
        (lambda h, w, y: linear_logp(h, w, y, bias=y.new_zeros(5)), "bias must be float64.*got int64. Convert"),
        (lambda h, w, y: linear_logp(h, w, y, bias=torch.zeros(5, device="meta")), "bias must lie on cpu .*got meta"),
        (lambda h, w, y: linear_logp(h, w, y, bias=torch.zeros(3)), "a bias .V. or none; got .* .3,."),
        (lambda h, w, y: linear_logp(h, w, y, outputs=("logits",)), "outputs: must be among entropy.*; got logits"),
        (lambda h, w, y: logp_entropy((h @ w.t()).int(), y), "logits must be float64.*got int32"),
        (lambda h, w, y: logp_entropy((h @ w.t()).to(torch.float8_e4m3fn), y), "logits must be .*got float8_e4m3fn"),
        (
            lambda h, w, y: logp_entropy(h @ w.t(), y.int()),
            "targets: must be int64 on cpu; got int32 on cpu. Use .long",
        ),
        (lambda h, w, y: logp_entropy(h @ w.t(), y.to("meta")), "must be int64 on cpu; got int64 on meta"),
        (lambda h, w, y: logp_entropy(h[:, :0], y), "a vocabulary of at least one word; got .2, 0."),
        (
            lambda h, w, y: logp_entropy(h @ w.t(), y, temperature=0.0),
            "temperature must be above 0 and finite; got 0.0",
        ),
        (
            lambda h, w, y: logp_entropy(h[:1].expand(2, 8), y, inplace_gradient=True),
            "must not be expanded .strides .0, 1..*Pass a copy",
        ),
        (lambda h, w, y: linear_logp(h, w[:0], y), "a vocabulary of at least one word; got .0, 8."),
        (lambda h, w, y: linear_logp(h, w, y, temperature=float("nan")), "temperature must be above 0"),
        (lambda h, w, y: linear_logp(h, w, y, soft_cap=0.0), "soft_cap must be above 0, or None for no cap; got 0.0"),
        (
            lambda h, w, y: linear_logp(h, w, y, label_smoothing=2.0),
            "label_smoothing must lie between 0 and 1; got 2.0",
        ),
        (lambda h, w, y: linear_logp(h, w, y, z_loss=-1.0), "z_loss must be 0 or more; got -1.0"),
        (lambda h, w, y: gated(h.int(), h.int()), "gate must be float64.*got int32"),
        (lambda h, w, y: rounded_rows(h.int()), "rounded_rows: x must be float64.*got int32"),
        (lambda h, w, y: rounded_rows(h, torch.ones(1, 5)), r"by \[1, C\] or none; got \(2, 8\) and \(1, 5\)"),
        (lambda h, w, y: rounded_rows(h[:, :0]), r"with C at least 1.*got \(2, 0\)"),
        (lambda h, w, y: rounded_rows(h[0]), r"must get x \[R, C\].*got \(8,\)"),
        (lambda h, w, y: transposed(h), r"must get FP8 numbers .R, C.; got float32 \(2, 8\)"),
        (lambda h, w, y: gated(h, h.to("meta")), "up must lie on cpu as the others do; got meta"),
        (lambda h, w, y: gated(h[0, 0], h[0, 0]), "at least one dimension"),
        (lambda h, w, y: gated(h, w), "gate and up must have one shape .*got .2, 8. torch.float32 and .5, 8."),
        (lambda h, w, y: gated(h, h, "relu"), "activation must be one of silu, gelu_tanh, gelu; got 'relu'"),
        (lambda h, w, y: gated_gradients(w, h, h), "grad must be .2, 8. as gate is; got .5, 8."),
        (
            lambda h, w, y: rope(*[torch.zeros(1, 2, 1, 8).half()] * 2, *[torch.zeros(1, 2, 8).int()] * 2),
            "rope: cos must be float64.*got int32",
        ),
        (
            lambda h, w, y: rope(*[torch.zeros(1, 2, 1, 8)] * 2, *[torch.zeros(3, 1, 2, 8)] * 2),
            r"rope: must get q \[B, T, Hq, D\].*cos \[B or 1, T, R\]; got .*\(3, 1, 2, 8\)",
        ),
        (
            lambda h, w, y: rope(*[torch.zeros(1, 2, 1, 8)] * 2, *[torch.zeros(1, 2, 10)] * 2),
            "with R even and at most 8; got",
        ),
        (
            lambda h, w, y: norm_rope(*[torch.zeros(1, 2, 1, 8).int()] * 2, None, None, *[torch.zeros(1, 2, 8)] * 2),
            "norm_rope: q must be float64.*got int32",
        ),
        (
            lambda h, w, y: norm_rope(
                *[torch.zeros(1, 2, 1, 8)] * 2,
                torch.zeros(8),
                torch.zeros(8, device="meta"),
                *[torch.zeros(1, 2, 8)] * 2,
            ),
            "k_weight must lie on cpu as the others do; got meta",
        ),
        (
            lambda h, w, y: norm_rope(*[torch.zeros(2, 1, 8)] * 2, None, None, *[torch.zeros(1, 2, 8)] * 2),
            r"must get q \[B, T, Hq, D\].*got \(2, 1, 8\)",
        ),
        (
            lambda h, w, y: norm_rope(*[torch.zeros(2, 2, 1, 8)] * 2, None, None, *[torch.zeros(3, 2, 8)] * 2),
            "batch of 1 or 2; got 3",
        ),
        (
            lambda h, w, y: norm_rope(
                *[torch.zeros(1, 2, 1, 8)] * 2, *[torch.zeros(4)] * 2, *[torch.zeros(1, 2, 8)] * 2
            ),
            r"must be \[8\]; got \(4,\)",
        ),
    ],
)
def test_what_an_op_does_not_serve_is_refused_in_one_sentence_that_says_what_it_does(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(2, 8), torch.zeros(5, 8), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    ("device", "capability", "words"),
    [
        ("cpu", None, "a CUDA device"),
        ("cuda", (7, 5), "a card of compute capability 8.0 or above, and this one has 7.5"),
        ("cuda", (8, 0), None),
    ],
)
def test_what_a_device_lacks_is_said_in_words(monkeypatch, device, capability, words):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    _card_serves.cache_clear()
    assert lacking(torch.device(device)) == words
    _card_serves.cache_clear()


def test_in_deterministic_mode_every_program_has_a_row_of_sums_for_itself():
    assert _sums((600, 3)) == 512
    torch.use_deterministic_algorithms(True)
    try:
        assert _sums((600, 3)) == 1800
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("words", "stride", "far"),
    [(151_936, 1, False), (2**31 - 10_000, 1, False), (2**31, 1, True), (151_936, 20_000, True)],
)
def test_places_in_a_row_take_64_bits_only_where_they_must(words, stride, far):
    assert wide(words, stride) is far


def test_what_the_process_allows_its_products_is_as_before_once_an_op_is_done():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    with sums_in_float32(torch.device("cuda")):
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
    assert matmul.allow_bf16_reduced_precision_reduction == before
    with sums_in_float32(torch.device("cpu")):
        assert matmul.allow_bf16_reduced_precision_reduction == before
