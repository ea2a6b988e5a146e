"""The cut head gives TRL's numbers with less memory, in every field of its output, and says what it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer.utils import add_fused_lm_head

from engine.compat.trl_head import set_label_count
from engine.config.method import METHODS
from engine.errors import ModelError
from engine.features import cut_cross_entropy as cut_rules
from engine.features.cut_cross_entropy import apply as cut_cross_entropy
from engine.planning.auto import effective
from engine.rules import read
from tests.engine.features.conftest import Meter, built_of, tiny_model
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def config(value=True, room=None):
    return SimpleNamespace(method=None, kernels=SimpleNamespace(use_cut_ce=value, cut_ce_workspace=room))


def batch(vocab=128, rows=3, length=24):
    ids = torch.randint(vocab, (rows, length))
    labels = ids.masked_fill(torch.rand(rows, length) < 0.6, -100)
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7}])
def test_every_output_and_gradient_is_that_of_the_plain_model(trained, changes):
    model = tiny_model().double()
    model.lm_head.requires_grad_(trained)
    inputs = batch()
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1] / changes.get("temperature", 1.0)
    targets = inputs["labels"][:, 1:]
    mask = targets != -100
    logp = torch.log_softmax(logits, -1)
    chosen = logp.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1) * mask
    weights = torch.randn_like(chosen)
    entropy = -(logp.exp() * logp).sum(-1) * mask
    (chosen * weights + 0.1 * entropy * weights.flip(0)).sum().backward()
    truth = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    add_fused_lm_head(model, outputs=OUTPUTS, **changes)
    done = cut_cross_entropy.apply(config(), built_of(SimpleNamespace(model=model)))
    out = model(**inputs, fused_lm_head=True)
    torch.testing.assert_close(out.log_probs, chosen, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(out.entropy, entropy, rtol=1e-10, atol=1e-10)
    assert torch.equal(out.is_top1.bool(), (logits.argmax(-1) == targets) & mask)
    torch.testing.assert_close(out.mean_logits, logits.mean(-1) * mask, rtol=1e-10, atol=1e-10)
    (out.log_probs * weights + 0.1 * out.entropy * weights.flip(0)).sum().backward()
    for name, gradient in truth.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-9, atol=1e-10)
    done.undo()


class Asked(TorchDispatchMode):
    """Counts operations whose result's shape is in the data: a host waits for a card that computes one."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = [each for each in args[1] if each is not None] if func.overloadpacket in self.INDEXED else []
        asks = func.overloadpacket in self.OPS or any(each.dtype == torch.bool for each in masks)
        self.count += asks
        return func(*args, **(kwargs or {}))

    OPS = torch.ops.aten.nonzero, torch.ops.aten.masked_select, torch.ops.aten._local_scalar_dense
    INDEXED = torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten._index_put_impl_


@pytest.mark.parametrize("told", [False, True])
def test_a_card_is_asked_once_which_tokens_have_a_label_and_not_at_all_where_their_number_is_known(told):
    model = tiny_model().double()
    model.lm_head.requires_grad_(False)
    add_fused_lm_head(model, outputs=OUTPUTS)
    cut_cross_entropy.apply(config(), built_of(SimpleNamespace(model=model)))
    inputs = batch()
    if told:
        set_label_count(inputs["labels"], int((inputs["labels"][:, 1:] != -100).sum()))
    backbone = model.base_model(input_ids=inputs["input_ids"]).last_hidden_state
    model.base_model.forward = lambda *args, **kwargs: SimpleNamespace(last_hidden_state=backbone)
    with Asked() as asked:
        out = model(**inputs, fused_lm_head=True)
        (gradient,) = torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), backbone)
    assert asked.count == (not told)
    again = model(**{**inputs, "labels": inputs["labels"].clone()}, fused_lm_head=True)
    assert torch.equal(out.log_probs, again.log_probs)
    assert torch.equal(out.is_top1, again.is_top1)
    (wanted,) = torch.autograd.grad(again.log_probs.sum() + again.entropy.sum(), backbone)
    assert torch.equal(gradient, wanted)


def test_its_memory_stays_far_below_the_logits_and_below_trls():
    vocab, peaks, losses = 20_000, {}, {}
    inputs = batch(vocab, rows=4, length=257)
    for name in ("trl", "ours"):
        model = tiny_model(vocab)
        model.lm_head.requires_grad_(False)
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        if name == "ours":
            cut_cross_entropy.apply(config(), built_of(SimpleNamespace(model=model)))
        with Meter() as meter:
            loss = -model(**inputs, fused_lm_head=True).log_probs.sum()
            loss.backward()
        peaks[name], losses[name] = meter.peak, loss.item()
    assert losses["ours"] == pytest.approx(losses["trl"], rel=1e-6)
    assert peaks["ours"] < 0.4 * peaks["trl"]
    assert peaks["ours"] < 4 * 256 * vocab * 4  # float32 logits of all tokens, which a plain loss holds


class Products(TorchDispatchMode):
    """Counts the words of the products with the vocabulary that are formed: V for each pass over all of it."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.words = tokens, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out) and args[0].shape[0] == self.tokens:
            self.words += out.shape[1]
        return out


def test_scores_that_fit_into_the_given_memory_are_not_computed_again():
    """20 MiB of them beside the 16 of a CPU, where some wait in the weight's gradient and the rest is formed once more."""
    vocab, seen, gradients = 8192, {}, {}
    ids = torch.randint(vocab, (1, 641), generator=torch.Generator().manual_seed(0))
    for room in (None, 32):
        model = tiny_model(vocab)
        add_fused_lm_head(model)
        done = cut_cross_entropy.apply(config(room=room), built_of(SimpleNamespace(model=model)))
        assert ("33.6 MB" in done.detail or "32.0 MiB" in done.detail) == (room == 32), done.detail
        with Products(640) as products:
            model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
        seen[room], gradients[room] = products.words, model.lm_head.weight.grad
    assert seen[32] == vocab
    assert vocab < seen[None] < 2 * vocab
    torch.testing.assert_close(gradients[32], gradients[None], rtol=1e-4, atol=1e-7)


def test_a_batch_without_a_label_gives_a_differentiable_zero():
    model = tiny_model()
    add_fused_lm_head(model)
    cut_cross_entropy.apply(config(), built_of(SimpleNamespace(model=model)))
    inputs = batch()
    loss = model(input_ids=inputs["input_ids"], labels=torch.full_like(inputs["labels"], -100), fused_lm_head=True).loss
    loss.backward()
    assert loss.item() == 0


def test_undo_gives_trls_head_back_and_leaves_its_module_alone():
    import trl.trainer.utils as theirs

    model = tiny_model()
    add_fused_lm_head(model)
    before, op = model.forward, theirs._ChunkedLogProbFunction
    done = cut_cross_entropy.apply(config(), built_of(SimpleNamespace(model=model)))
    assert model.forward is not before
    assert theirs._ChunkedLogProbFunction is op
    done.undo()
    assert model.forward == before


def test_a_model_without_a_head_is_said_in_words_and_an_adapter_on_the_head_is_refused():
    from peft import LoraConfig, get_peft_model

    said = cut_cross_entropy.apply(config(), built_of(SimpleNamespace(model=tiny_model())))
    assert "no vocabulary head" in said.detail
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["lm_head"], r=2))
    add_fused_lm_head(model.get_base_model())
    with pytest.raises(ModelError, match="adapter of its own"):
        cut_cross_entropy.apply(config(), built_of(SimpleNamespace(model=model)))


@pytest.mark.parametrize(
    ("method", "adapter", "rows"),
    [
        ("sft", "lora", CONVERSATIONS),
        ("dpo", "none", PAIRS),
        pytest.param("dpo", "lora", PAIRS, marks=pytest.mark.slow),
    ],
)
def test_runs_give_the_same_losses_with_it(train, source, method, adapter, rows):
    settings = {"method.kind": method, "adapter.kind": adapter, "data.train": [{"path": source(rows)}]}
    runs = [train({**settings, "optim.max_steps": 4, "kernels.use_cut_ce": value}) for value in (False, True)]
    losses = [[event["loss"] for event in lines(run, "metrics")] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)
    said = {entry["feature"]: entry for entry in lines(runs[1], "receipt")[0]["entries"]}[cut_cross_entropy.FEATURE]
    assert said["count"] == (2 if (method, adapter) == ("dpo", "none") else 1)
    assert ("frozen head" in said["detail"]) == (adapter == "lora")


ADDED = {"method.label_smoothing": 0.2, "method.z_loss": 0.01}
PACKED = {"method.kind": "pretrain", "data.packing": True, "data.packing_cross_doc_attn_mask": True}
TEXT = [{"text": f"{number} is followed by {number + 1}, and that by {number + 2}."} for number in range(60)]


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        pytest.param({}, CONVERSATIONS, marks=pytest.mark.slow),
        pytest.param({"adapter.kind": "lora"}, CONVERSATIONS, marks=pytest.mark.slow),
        (PACKED, TEXT),
    ],
    ids=["sft", "sft, lora", "pretrain, packed"],
)
def test_a_config_asks_for_smoothing_and_z_loss_and_accumulation_sums_them_as_one_batch_does(
    train, source, settings, rows
):
    rate = {"optim.learning_rate": 1e-3, "optim.max_steps": 2, "run.save_steps": 2, "data.shuffle": False}
    base = {**settings, **rate, "data.train": [{"path": source(rows)}]}
    batches = [
        {"optim.per_device_train_batch_size": size, "optim.gradient_accumulation_steps": 4 // size} for size in (4, 1)
    ]
    plain, *with_them = (train({**base, **each}) for each in (batches[0], *({**ADDED, **each} for each in batches)))
    losses = [[event["loss"] for event in lines(run, "metrics")] for run in (plain, *with_them)]
    assert losses[1][0] > 1.01 * losses[0][0]
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
    said = {entry["feature"]: entry for entry in lines(with_them[0], "receipt")[0]["entries"]}[
        cut_cross_entropy.FEATURE
    ]
    assert said["detail"].endswith("; label smoothing 0.2 in the loss; z-loss 0.01 in the loss")


@pytest.mark.parametrize("kind", [kind for kind in METHODS if kind not in ("sft", "pretrain")])
def test_methods_of_other_losses_refuse_them_by_name(kind):
    for name in ("z_loss", "label_smoothing"):
        found = read({"method": {"kind": kind, name: 0.1}}).findings
        refused = [finding for finding in found if finding.path == f"method.{name}" and finding.severity == "error"]
        assert len(refused) == 1, name


@pytest.mark.parametrize("kernels", [{}, {"kernel_auto_compose": True}])
@pytest.mark.parametrize("kind", ["sft", "pretrain"])
def test_auto_takes_it_where_the_loss_needs_it_and_the_estimate_knows(kind, kernels):
    plain, smooth = (
        read({"method": {"kind": kind, **own}, "kernels": kernels}).config for own in ({}, {"label_smoothing": 0.1})
    )
    why = {entry.path: entry for entry in effective(smooth)}["kernels.use_cut_ce"]
    assert (why.effective, why.reason) == (True, "it computes method.label_smoothing")
    assert [cut_rules.path_of(each) for each in (plain, smooth)] == ["fused", "cut"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda model: model.lm_head.to(torch.float8_e4m3fn), "the head is held in float8_e4m3fn"),
        (lambda model: model.lm_head.to("meta"), r"not in memory \(meta device\)"),
        (
            lambda model: setattr(model.lm_head, "bias", torch.nn.Parameter(torch.zeros(3))),
            "bias is .3,. for a vocabulary",
        ),
        (lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(torch.zeros(4, 128, 8))), "not one matrix"),
    ],
)
def test_a_head_that_the_op_does_not_serve_is_refused_before_the_first_step_with_what_does(spoil, words):
    model = tiny_model()
    add_fused_lm_head(model)
    spoil(model)
    with pytest.raises(ModelError, match=words) as refused:
        cut_cross_entropy.apply(config(), built_of(SimpleNamespace(model=model)))
    assert "TRL's own head serves it" in refused.value.hint


def test_the_receipt_says_that_float64_has_no_kernel(monkeypatch):
    assert cut_cross_entropy.effective(torch.zeros(1)) == "torch, in chunks"
    monkeypatch.setattr(cut_cross_entropy, "lacking", lambda device: None)
    assert cut_cross_entropy.effective(torch.zeros(1)) == "Triton"
    assert "no kernel serves float64" in cut_cross_entropy.effective(torch.zeros(1, dtype=torch.float64))
