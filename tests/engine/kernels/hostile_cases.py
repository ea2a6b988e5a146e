"""What no caller should ask of a kernel: either the right numbers or an error, on every device, never other numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from engine.kernels.fp8_rows import rounded_rows, rounded_rows_reference
from engine.kernels.gated import gated, gated_gradients, gated_reference
from engine.kernels.linear_logp import linear_logp, linear_logp_reference
from engine.kernels.logp_entropy import logp_entropy, logp_entropy_reference
from engine.kernels.norm_rope import norm_rope, norm_rope_reference
from engine.kernels.rope import rope, rope_reference
from tests.engine.kernels.judging import DEVICE, INTERPRETED, said


def refused(words: str, run: Callable[[], object]) -> bool:
    try:
        run()
    except RuntimeError as problem:
        return words in str(problem)
    return False


def second_derivatives() -> None:
    """A gradient that is differentiated again would come out without what the kernels computed: it is refused."""
    h, w = torch.randn(4, 8, device=DEVICE, requires_grad=True), torch.randn(50, 8, device=DEVICE)
    targets, turn = torch.arange(4, device=DEVICE), torch.randn(1, 4, 8, device=DEVICE)
    for name, op in (
        ("linear_logp", lambda: linear_logp(h, w, targets, outputs=()).log_probs),
        ("logp_entropy", lambda: logp_entropy(h @ w.t(), targets)[0]),
        ("gated", lambda: gated(h, h)),
        ("norm_rope", lambda: norm_rope(h[None, :, None], h[None, :, None], None, None, turn.cos(), turn.sin())[0]),
    ):
        again = refused("differentiated again", lambda op=op: torch.autograd.grad(op().sum(), h, create_graph=True))
        said(again, f"{name}: a second derivative is refused")


def computed_again() -> None:
    """Under both kinds of checkpoint each op has the gradient that it has without."""
    h, w = torch.randn(4, 8, device=DEVICE, requires_grad=True), torch.randn(50, 8, device=DEVICE)
    targets, turn = torch.arange(4, device=DEVICE), torch.randn(1, 4, 8, device=DEVICE)
    angles = turn.cos(), turn.sin()
    for name, op in (
        ("linear_logp", lambda x: linear_logp(x, w, targets, outputs=()).log_probs),
        ("linear_logp, trained", lambda x: linear_logp(x, w.clone().requires_grad_(), targets, outputs=()).log_probs),
        ("logp_entropy", lambda x: sum(logp_entropy(x, targets))),
        ("logp_entropy in place", lambda x: logp_entropy(x * 1.0, targets, inplace_gradient=True)[0]),
        ("gated", lambda x: gated(x, x)),
        ("norm_rope", lambda x: norm_rope(x[None, :, None], x[None, :, None], None, None, *angles)[0]),
        ("rope", lambda x: rope(x[None, :, None], x[None, :, None], *angles)[0]),
    ):
        plain = torch.autograd.grad(op(h).square().sum(), h)[0]
        for reentrant in (False, True):
            h.grad = None
            checkpoint(op, h, use_reentrant=reentrant).square().sum().backward()
            same = h.grad is not None and torch.allclose(h.grad, plain, rtol=1e-5, atol=1e-5)
            said(same, f"{name} in a checkpoint, reentrant={reentrant}")


def caps_far_above() -> None:
    """Under a cap that nothing reaches logits are what they are without one: in what is left over of 1 they are lost."""
    h, w, targets = torch.randn(4, 8, device=DEVICE), torch.randn(50, 8, device=DEVICE), torch.arange(4, device=DEVICE)
    for trained in (True, False):
        found = []
        for cap in (1e6, None):
            hidden = h.clone().requires_grad_()
            scores = linear_logp(hidden, w.clone().requires_grad_(trained), targets, soft_cap=cap)
            gradient = torch.autograd.grad(scores.log_probs.sum() + scores.entropy.sum(), hidden)[0]
            found.append((scores.log_probs, scores.entropy, gradient))
        close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*found, strict=True))
        said(close, f"linear_logp under a cap far above, trained={trained}")


def trained_angles() -> None:
    """Angles that are trained get their gradient, which the kernels do not make."""
    q, k = torch.randn(2, 3, 4, 8, device=DEVICE), torch.randn(2, 3, 2, 8, device=DEVICE)
    for name, op, reference in (
        ("rope", rope, rope_reference),
        (
            "norm_rope",
            lambda *x: norm_rope(*x[:2], None, None, *x[2:]),
            lambda *x: norm_rope_reference(*x[:2], None, None, *x[2:]),
        ),
    ):
        turn = torch.randn(1, 3, 8, device=DEVICE, requires_grad=True)
        ours, theirs = (
            torch.autograd.grad(sum(x.square().sum(-1).sin().sum() for x in f(q, k, turn, turn * 0.5)), turn)[0]
            for f in (op, reference)
        )
        said(torch.allclose(ours, theirs), f"{name} of trained angles")


def overwritten_logits() -> None:
    """Logits that their gradient has taken the place of are read by nobody after that."""
    x, targets = torch.randn(4, 50, device=DEVICE, requires_grad=True), torch.arange(4, device=DEVICE)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return logp_entropy(logits, targets, inplace_gradient=True)[0].sum()

    whole = loss(x * 1.0)
    torch.autograd.grad(whole, x, retain_graph=True)
    said(refused("modified by an inplace", lambda: torch.autograd.grad(whole, x)), "logp_entropy in place: once alone")
    squashed = loss(x.tanh())  # whose gradient needs its result
    said(
        refused("modified by an inplace", lambda: torch.autograd.grad(squashed, x)), "logp_entropy in place under tanh"
    )


def words_that_cannot_come() -> None:
    """A logit of minus infinity has no probability: entropy and every gradient stay finite, as if the word were not."""
    h, w, targets = torch.randn(3, 8, device=DEVICE), torch.randn(50, 8, device=DEVICE), torch.arange(3, device=DEVICE)
    open_words = torch.ones(50, dtype=torch.bool, device=DEVICE)
    open_words[7:20] = False
    bias = torch.zeros(50, device=DEVICE).masked_fill(~open_words, float("-inf"))
    without = w[open_words], targets
    for trained in (True, False):
        found = {}
        for name, op, head, more in (
            ("all", linear_logp, (w, targets), {"bias": bias}),
            ("open", linear_logp_reference, without, {}),
            ("reference", linear_logp_reference, (w, targets), {"bias": bias}),
        ):
            hidden, matrix = h.clone().requires_grad_(), head[0].clone().requires_grad_(trained)
            scores = op(hidden, matrix, head[1], **more)
            gradient = torch.autograd.grad(scores.log_probs.sum() + 0.3 * scores.entropy.sum(), hidden)[0]
            found[name] = scores.log_probs, scores.entropy, gradient
        for name in ("all", "reference"):
            close = all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found[name], found["open"], strict=True))
            said(close, f"linear_logp of words that cannot come, {name}, trained={trained}")
    logits = h @ w.t() + bias
    truth = logp_entropy_reference(logits[:, open_words], targets)
    for name, op in (("kernel", logp_entropy), ("reference", logp_entropy_reference)):
        leaf = logits.clone().requires_grad_()
        scores = op(leaf, targets)
        gradient = torch.autograd.grad(sum(x.sum() for x in scores), leaf)[0]
        good = all(torch.allclose(a, b, atol=1e-4) for a, b in zip(scores, truth, strict=True))
        said(good and bool(gradient.isfinite().all()), f"logp_entropy of words that cannot come, {name}")


def beyond_2_to_the_31() -> None:
    """One tensor of more elements than 32 bits count: its last rows are those of the rows alone. Small in the interpreter."""
    rows, width = (5, 8) if INTERPRETED else (2**21 + 1, 1024)
    x = torch.empty(rows, width, dtype=torch.bfloat16, device=DEVICE)
    x[-3:] = torch.randn(3, width, device=DEVICE)
    last = x[-3:].clone()

    def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        return torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=1e-2)

    said(near(gated(x, x)[-3:], gated_reference(last, last)), "gated beyond 2^31")
    spent = gated_gradients(last, last, last)[0]
    said(near(gated_gradients(x, x, x)[0][-3:], spent), "gated's gradient beyond 2^31")
    numbers, scale = rounded_rows(x)
    wanted = rounded_rows_reference(last)
    good = torch.equal(numbers[-3:].float(), wanted[0].float()) and torch.equal(scale[-3:], wanted[1])
    said(good, "rounded_rows beyond 2^31")
    del numbers, scale
    heads = x.view(1, rows, -1, 8)
    angles = torch.randn(1, rows, 8, device=DEVICE)
    turned = norm_rope(heads, heads[:, :, :1], None, None, angles.cos(), angles.sin())[0][:, -3:]
    alone = angles[:, -3:]
    plain = norm_rope_reference(heads[:, -3:], heads[:, -3:, :1], None, None, alone.cos(), alone.sin())[0]
    said(near(turned, plain), "norm_rope beyond 2^31")
    turned = rope(heads, heads[:, :, :1], angles.cos(), angles.sin())[0][:, -3:]
    plain = rope_reference(heads[:, -3:], heads[:, -3:, :1], alone.cos(), alone.sin())[0]
    said(near(turned, plain), "rope beyond 2^31")
    apart = x.view(1, -1, rows, 8).transpose(1, 2)  # heads before time: one head's numbers are far from the next's
    turned = rope(apart, apart[:, :, :1], angles.cos(), angles.sin())[0][:, -3:, -1:]
    plain = rope_reference(*[apart[:, -3:, -1:]] * 2, alone.cos(), alone.sin())[0]
    said(near(turned, plain), "rope of heads beyond 2^31")
