"""cuDNN's attention over documents: what it is told, and when torch's own computes in its place.

A CPU has no cuDNN. What a plan computes is done here by plain torch from nothing but the table that cuDNN reads: where each
document begins, counted in numbers, and how many tokens it has. The kernel itself is tested on a card, below.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from engine.features.attention_backend import apply as attention_backend
from engine.features.attention_backend import cudnn_documents, varlen
from engine.features.attention_backend.backend import settle
from engine.features.built import Built
from engine.features.gradient_checkpointing.tiers import POLICIES, _kept, use_tier
from tests.engine.features.attention_backend.test_documents import config, packs, step
from tests.engine.features.conftest import tiny_model
from tests.engine.features.families import made


class PlainPlan:
    """A plan in plain torch."""

    def __init__(self, heads, sizes, scale):
        self.heads, self.sizes, self.scale = heads, sizes, scale

    def _documents(self, table):
        """Each document's numbers of queries, of keys and of sums, and its tokens."""
        heads, shared, width = self.heads
        places, longest, _ = self.sizes
        assert table.shape[1] % 4 == 0  # 16 bytes
        for at_q, at_k, at_lse, length in table[:, :places].T.tolist():
            assert length <= longest
            if not length:
                continue
            q, k, sums = (
                slice(at, at + length * count)
                for at, count in ((at_q, heads * width), (at_k, shared * width), (at_lse, heads))
            )
            yield q, k, sums, length

    def _heads(self, x, part, length):
        """[heads, length, width], those that share keys repeated."""
        rows = x.flatten()[part].view(length, -1, self.heads[2]).transpose(0, 1)
        return rows.repeat_interleave(self.heads[0] // rows.shape[0], 0)

    def _scores(self, q, k, v, parts):
        at_q, at_k, _, length = parts
        own, key, value = self._heads(q, at_q, length), self._heads(k, at_k, length), self._heads(v, at_k, length)
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        return own, key, value, (self.scale * own @ key.mT).masked_fill(ahead, -torch.inf)

    def forward(self, q, k, v, table):
        assert self.sizes[2] >= q.shape[0]
        out, lse = torch.full_like(q, torch.nan), q.new_full(q.shape[:2], torch.nan)
        for parts in self._documents(table):
            _, _, value, scores = self._scores(q, k, v, parts)
            out.view(-1)[parts[0]] = (scores.softmax(-1) @ value).transpose(0, 1).flatten()
            lse.view(-1)[parts[2]] = scores.logsumexp(-1).T.flatten()
        return out, lse

    def backward(self, slope, q, k, v, out, lse, table):
        found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        for parts in self._documents(table):
            at_q, at_k, sums, length = parts
            own, key, value, scores = self._scores(q, k, v, parts)
            above, answer = self._heads(slope, at_q, length), self._heads(out, at_q, length)
            shares = (scores - lse.flatten()[sums].view(length, -1).T[..., None]).exp()
            uneven = shares * (above @ value.mT - (above * answer).sum(-1, keepdim=True)) * self.scale
            for x, at, gradient in zip(
                found, (at_q, at_k, at_k), (uneven @ key, uneven.mT @ own, shares.mT @ above), strict=True
            ):
                shared = gradient.view(x.shape[1], -1, *gradient.shape[1:]).sum(1)
                x.view(-1)[at] = shared.transpose(0, 1).flatten()
        return found


@pytest.fixture
def plans(monkeypatch):
    """The plans that were made."""
    made = {}

    def plan_for(device, dtype, heads, sizes, scale):
        return made.setdefault((dtype, heads, sizes, scale), PlainPlan(heads, sizes, scale))

    monkeypatch.setattr(cudnn_documents, "plan_for", plan_for)
    monkeypatch.setattr(cudnn_documents, "lacking", varlen.lacking)  # without the package
    monkeypatch.setattr("engine.features.attention_backend.backend.installed", lambda package: "1.18.0")
    return made


@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_and_gradients_are_those_of_the_mask_and_one_plan_serves_all_layers(plans, checkpointing, monkeypatch):
    model, batch = tiny_model().double(), packs()
    loss, gradients = step(model, batch)
    settle(model, "cudnn")
    assert model.config._attn_implementation == "cudnn"
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    attention_backend.prepare(config(), Built(model))
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", None)
    ours, found = step(model.train(), batch)
    assert ours == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    assert [sizes[:2] for _, _, sizes, _ in plans] == [(16, 256)]


def test_batches_of_other_documents_share_a_plan(plans):
    model, batch = tiny_model().double(), packs()
    settle(model, "cudnn")
    attention_backend.prepare(config(), Built(model))
    for cut in (12, 9, 11, 7):
        step(model, {key: value[:, :cut] for key, value in batch.items()})
    assert len(plans) == 1


@pytest.mark.parametrize(("tier", "times"), [("full", 2), ("medium", 1), ("selective", 1)])
def test_tiers_that_keep_attention_do_not_compute_it_again(plans, tier, times, monkeypatch):
    calls = []
    plain = PlainPlan.forward
    monkeypatch.setattr(PlainPlan, "forward", lambda *given: (calls.append(1), plain(*given))[1])
    model = tiny_model()
    settle(model, "cudnn")
    if tier in POLICIES:
        use_tier(model, tier)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    attention_backend.prepare(config(), Built(model))
    step(model.train(), packs())
    assert len(calls) == times * len(model.model.layers)


def test_torchs_attention_over_documents_is_kept_too():
    import torch.nn.attention.varlen

    assert _kept(torch.ops.torch_attn._varlen_attn.default, (), 1)


@pytest.mark.parametrize(
    ("documents_told", "longest", "expected"), [(3, 7, (16, 256)), (17, 257, (32, 512)), (16, 256, (16, 256))]
)
def test_places_and_the_longest_document_are_powers_of_two(documents_told, longest, expected):
    bounds = torch.arange(documents_told + 1, dtype=torch.int32) * 2
    told = cudnn_documents.in_places({"cu_seq_lens_q": bounds, "max_length_q": longest})
    assert (told["cu_seq_lens_q"].numel() - 1, told["max_length_q"]) == expected
    assert told["cu_seq_lens_q"][: documents_told + 1].equal(bounds)
    assert (told["cu_seq_lens_q"][documents_told:] == 2 * documents_told).all()
    assert told["cu_seq_lens_q"].dtype == torch.int32


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2", "qwen3", "phi3", "granite", "cohere"])
def test_each_family_has_the_losses_of_the_mask_and_windows_are_torchs(plans, family, monkeypatch):
    windows = []

    def torchs(q, k, v, bounds, longest, scaling, window):
        windows.append(window)
        plan = PlainPlan((q.shape[1], k.shape[1], q.shape[2]), (bounds.numel() - 1, longest, q.shape[0]), scaling)
        return plan.forward(q, k, v, cudnn_documents._table(q, k, bounds))[0]

    monkeypatch.setattr(varlen, "over_documents", torchs)
    model, batch = made(family).double(), packs(61)
    masked = model(**batch, use_cache=False).loss.item()
    settle(model, "cudnn")
    attention_backend.prepare(config(), Built(model))
    assert model(**batch, use_cache=False).loss.item() == pytest.approx(masked, rel=1e-12)
    assert len(windows) == (family == "gemma3")  # one of its two layers sees a window
    assert plans


def test_graphs_of_other_batches_know_what_comes_out_without_a_plan():
    """Forward and backward under fake tensors, as the compiler sees them."""
    q, k, v = (torch.randn(12, heads, 8) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 5, 12, 12], dtype=torch.int32)

    def plan_for(*given):
        return PlainPlan((4, 2, 8), (3, 256, 256), 0.3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn_documents, "plan_for", plan_for)
        torch.library.opcheck(
            cudnn_documents.attention_over_documents,
            (*(x.requires_grad_() for x in (q, k, v)), bounds, 7, 0.3),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )
        run = torch.compile(
            lambda *x: cudnn_documents.attention_over_documents(*x, bounds, 7, 0.3)[0],
            backend="aot_eager",
            fullgraph=True,
        )
        slope = torch.randn_like(q)
        compiled = torch.autograd.grad(run(q, k, v), (q, k, v), slope)
        plain = torch.autograd.grad(
            cudnn_documents.attention_over_documents(q, k, v, bounds, 7, 0.3)[0], (q, k, v), slope
        )
    for a, b in zip(compiled, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_numbers_of_other_formats_are_refused_and_never_read_as_16_bits(plans, monkeypatch):
    q, k, v = (torch.randn(4, 2, 8) for _ in range(3))
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"must be of one dtype; got torch\.float32, torch\.bfloat16"):
        cudnn_documents.attention_over_documents(q, k.bfloat16(), v, bounds, 4, 1.0)
    kinds = SimpleNamespace(BFLOAT16=0, HALF=1)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(data_type=kinds))
    with pytest.raises(RuntimeError, match="in bfloat16 and float16, not in float32"):
        cudnn_documents.Plan(torch.float32, (2, 2, 8), (1, 4, 4), 1.0)


def test_what_it_was_not_tried_for_is_refused_with_the_reason(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr("engine.features.attention_backend.backend.installed", lambda package: None)
    assert settle(model, "cudnn") == "cudnn does not serve here: the package nvidia-cudnn-frontend is not installed"
    monkeypatch.setattr("engine.features.attention_backend.backend.installed", lambda package: "1.18.0")
    monkeypatch.setitem(
        __import__("sys").modules, "cudnn", type("cudnn", (), {"backend_version": staticmethod(lambda: 91002)})
    )
    assert settle(model, "cudnn") == "cudnn does not serve here: it needs cuDNN 9.19, and 9.10 is installed"
    torch.use_deterministic_algorithms(True)
    try:
        reason = settle(model, "cudnn")
    finally:
        torch.use_deterministic_algorithms(False)
    assert reason.endswith("its deterministic form would take gigabytes of workspace")
    assert model.config._attn_implementation == "sdpa"


def test_where_it_does_not_serve_on_a_card_torchs_own_over_documents_is_tried_next(plans, monkeypatch):
    tried = []

    def trial(name, model, device):
        tried.append(name)
        return "no kernel for this card" if name == "cudnn" or len(tried) > 2 else None

    monkeypatch.setattr("engine.features.attention_backend.backend.trial", trial)
    model = tiny_model()
    assert settle(model, "cudnn", torch.device("cpu")) == "cudnn does not serve here: no kernel for this card"
    assert tried == ["cudnn", "varlen"]
    assert model.config._attn_implementation == "varlen"
    model = tiny_model()
    reason = settle(model, "cudnn", torch.device("cpu"))
    assert model.config._attn_implementation == "sdpa"
    assert reason.endswith("card; varlen does not serve here: no kernel for this card")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("depth", [0, 120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
def test_on_the_gpu_outputs_and_gradients_are_those_of_each_document_alone(width, dtype, depth):
    """Documents of all remainders, one token long too; scores around 0, and so far below that their exponentials overflow."""
    pytest.importorskip("cudnn")
    if torch.cuda.get_device_capability()[0] != 9 or cudnn_documents.lacking(tiny_model()) is not None:
        pytest.skip("cuDNN 9.19 and a Hopper card")
    each = [1, 64, 192, 704, 320, 127, 129, 65, 512, 1]
    draw = torch.Generator("cuda").manual_seed(depth)
    given = [torch.randn(sum(each), heads, width, device="cuda", generator=draw) for heads in (8, 2, 2, 8)]
    if depth:
        given[0], given[1] = 0.1 * given[0], 0.1 * given[1]
        given[0][..., 0], given[1][..., 0] = 1.0, -depth * width**0.5
    *inputs, slope = (x.to(dtype) for x in given)
    bounds = torch.tensor([0, *each], device="cuda").cumsum(0).int()

    def alone(q, k, v):
        outs = []
        for own, key, value in zip(*(x.split(each) for x in (q, k, v)), strict=True):
            key, value = (x.repeat_interleave(4, 1).transpose(0, 1) for x in (key, value))
            scores = (own.transpose(0, 1) @ key.mT * width**-0.5).float()
            ahead = torch.ones(len(own), len(own), dtype=torch.bool, device="cuda").triu(1)
            shares = scores.masked_fill(ahead, -torch.inf).softmax(-1).to(q.dtype)
            outs.append((shares @ value).transpose(0, 1))
        return torch.cat(outs)

    def ours(q, k, v):
        told = cudnn_documents.in_places({"cu_seq_lens_q": bounds, "max_length_q": max(each)})
        return cudnn_documents.attention_over_documents(
            q, k, v, told["cu_seq_lens_q"], told["max_length_q"], width**-0.5
        )[0]

    def both(run, *tensors):
        *leaves, above = (x.detach().clone().requires_grad_() for x in tensors)
        out = run(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, above.detach())]

    truth = both(alone, *(x.float() for x in (*inputs, slope)))
    plain, found = both(alone, *inputs, slope), both(ours, *inputs, slope)
    torch.compiler.reset()
    again = both(torch.compile(ours, fullgraph=True), *inputs, slope)
    for name, *four in zip(("out", "dq", "dk", "dv"), truth, plain, found, again, strict=True):
        # With all keys alike in one number, what queries get of it is a difference of large equal sums: rounding alone.
        right, eager, fast, compiled = (x[..., 1:].float() if depth and name == "dq" else x.float() for x in four)
        assert (fast - right).norm() <= 2 * (eager - right).norm() + 1e-6, name
        assert (compiled - right).norm() <= 2 * (eager - right).norm() + 1e-6, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_gpu_no_document_sees_what_its_neighbours_hold():
    """Numbers of one document stay when all others change to what would show."""
    pytest.importorskip("cudnn")
    if torch.cuda.get_device_capability()[0] != 9 or cudnn_documents.lacking(tiny_model()) is not None:
        pytest.skip("cuDNN 9.19 and a Hopper card")
    each = [64, 192, 70, 320, 5]
    torch.manual_seed(0)
    given = [torch.randn(sum(each), heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2, 4)]
    bounds = torch.tensor([0, *each], device="cuda").cumsum(0).int()

    def both(*tensors):
        *leaves, above = (x.detach().clone().requires_grad_() for x in tensors)
        out = cudnn_documents.attention_over_documents(*leaves, bounds, 512, 128**-0.5)[0]
        return [out.detach(), *torch.autograd.grad(out, leaves, above.detach())]

    before = both(*given)
    for number, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        others = torch.ones(sum(each), 1, 1, device="cuda", dtype=torch.bool)
        others[begin:end] = False
        after = both(*(torch.where(others, 50 * torch.randn_like(x), x) for x in given))
        for a, b in zip(before, after, strict=True):
            # Gradients of queries are added in another order each time.
            error = (a[begin:end].float() - b[begin:end].float()).norm() / a[begin:end].float().norm()
            assert error < 1e-2, number
