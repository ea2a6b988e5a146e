"""The checks that every device runs: the error-ratio test against float64, over odd shapes, strides and settings.

Run as a script it checks the kernels on CUDA, or in Triton's interpreter with TRITON_INTERPRET=1, all of them or those
named (`linear_logp_cases:bfloat16`: in this number format alone); it prints a line a case and exits 1 if one fails. The
tests call it in a process of its own, because Triton reads that variable once.
"""

from __future__ import annotations

import itertools
import os
import sys

import torch

from engine.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from engine.kernels.linear_logp import linear_logp, linear_logp_reference
from engine.kernels.logp_entropy import logp_entropy, logp_entropy_reference
from engine.kernels.norm_rope import norm_rope, norm_rope_reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
FAILURES: list[str] = []


def rms(x: torch.Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def judge(
    name: str, truth: torch.Tensor, eager: torch.Tensor, ours: torch.Tensor, step: torch.dtype, averaged: int = 0
) -> None:
    """Ours may be at most twice as far from the truth as plain torch in the same dtype.

    A mean over `averaged` logits of about one is small where they cancel, and its rounding may cancel by luck in either
    form: it is granted twice what independent roundings of its terms to `step` leave, and one rounding of its sum.
    """
    size = rms(truth) + 1e-30
    luck = 2 * torch.finfo(step).eps / (12 * averaged) ** 0.5 + torch.finfo(torch.float32).eps if averaged else 0.0
    error, bound = rms(ours.double() - truth), 2 * rms(eager.double() - truth) + 2e-6 * size + luck
    good = error <= bound and bool(torch.isfinite(ours).all())
    print(f"{'ok  ' if good else 'FAIL'} {name}: error {error / size:.2e}, allowed {bound / size:.2e}")
    if not good:
        FAILURES.append(name)


def compare(name: str, op, reference, inputs: list[torch.Tensor], outputs: int, averaged: int = 0) -> None:
    """Outputs and every input's gradient, under one random upstream gradient."""
    results = {}
    upstream: list[torch.Tensor] = []
    for key, function, dtype in (("truth", reference, torch.float64), ("eager", reference, None), ("ours", op, None)):
        leaves = [
            (x.detach().to(dtype) if dtype and x.is_floating_point() else x.detach().clone()).requires_grad_(
                x.requires_grad
            )
            for x in inputs
        ]
        out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        if not upstream:
            upstream = [torch.randn_like(y) for y in out]
        torch.autograd.backward(out, [g.to(y.dtype) for g, y in zip(upstream, out, strict=True)])
        results[key] = [*out, *(leaf.grad for leaf in leaves if leaf.requires_grad)]
    for i, (truth, eager, ours) in enumerate(zip(results["truth"], results["eager"], results["ours"], strict=True)):
        kind, terms = ("output", averaged) if i < outputs else ("gradient", 0)
        judge(f"{name} {kind} {i}", truth, eager, ours, inputs[0].dtype, terms)


def logp_entropy_cases() -> None:
    shapes = [(1, 3, 37), (2, 5, 513)] if INTERPRETED else [(1, 3, 37), (2, 33, 5003), (2, 64, 151_936)]
    for dtype, (batch, time, vocabulary), temperature in itertools.product(DTYPES, shapes, (1.0, 0.7)):
        logits = (3 * torch.randn(batch, time + 1, vocabulary, device=DEVICE)).to(dtype).requires_grad_()
        targets = torch.randint(vocabulary, (batch, time), device=DEVICE)
        targets[0, 0] = -100
        for label, view in (("slice", lambda x: x[:, :-1]), ("transposed", lambda x: x.mT.contiguous().mT[:, 1:])):
            compare(
                f"logp_entropy {dtype} {batch}x{time}x{vocabulary} T={temperature} {label}",
                lambda x, view=view, t=temperature, y=targets: logp_entropy(view(x), y, temperature=t),
                lambda x, view=view, t=temperature, y=targets: logp_entropy_reference(view(x), y, temperature=t),
                [logits],
                2,
            )


def logp_entropy_in_place() -> None:
    logits = torch.randn(2, 4, 301, device=DEVICE)
    targets = torch.randint(301, (2, 4), device=DEVICE)
    kept, spent = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logp_entropy(kept, targets)[0].sum().backward()
    logp_entropy(spent, targets, inplace_gradient=True)[0].sum().backward()
    same = torch.equal(kept.grad, spent.grad) and spent.grad.data_ptr() == spent.data_ptr()
    print("ok   logp_entropy in place" if same else "FAIL logp_entropy in place")
    if not same:
        FAILURES.append("logp_entropy in place")


def norm_rope_cases() -> None:
    shapes = [(2, 3, 4, 2, 16, 16), (1, 5, 3, 1, 24, 8)]
    if not INTERPRETED:
        shapes += [(2, 257, 32, 8, 128, 128), (1, 100, 16, 2, 256, 64), (2, 65, 5, 5, 80, 80)]
    for dtype, shape, offset, scaled in itertools.product(DTYPES, shapes, (False, True), (True, False)):
        batch, time, heads_q, heads_k, size, rotated = shape
        q = torch.randn(batch, time, heads_q, size, device=DEVICE).to(dtype).requires_grad_()
        k = torch.randn(batch, time, heads_k, size, device=DEVICE).to(dtype).requires_grad_()
        weights = [torch.rand(size, device=DEVICE).to(dtype).requires_grad_() for _ in range(2)] if scaled else []
        angles = torch.randn(batch, time, rotated, device=DEVICE)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

        def call(function, q, k, *w, cos=cos, sin=sin, offset=offset):
            w = w or (None, None)
            return function(q, k, *w, cos.to(q.dtype), sin.to(q.dtype), unit_offset=offset)

        compare(
            f"norm_rope {dtype} {shape} offset={offset} scaled={scaled}",
            lambda *x: call(norm_rope, *x),
            lambda *x: call(norm_rope_reference, *x),
            [q, k, *weights],
            2,
        )


def norm_rope_blocks() -> None:
    """Fewer heads a program than there are, and a last program that is not full."""
    import engine.kernels.norm_rope as package

    before = package._FORWARD, package._BACKWARD
    package._FORWARD = package._BACKWARD = (2, 1)
    q, k = (torch.randn(2, 3, heads, 24, device=DEVICE).requires_grad_() for heads in (5, 3))
    weights = [torch.rand(24, device=DEVICE).requires_grad_() for _ in range(2)]
    angles = torch.randn(2, 3, 8, device=DEVICE)

    def call(function, q, k, *w):
        return function(q, k, *w, angles.cos().to(q.dtype), angles.sin().to(q.dtype))

    compare(
        "norm_rope in blocks of heads",
        lambda *x: call(norm_rope, *x),
        lambda *x: call(norm_rope_reference, *x),
        [q, k, *weights],
        2,
    )
    package._FORWARD, package._BACKWARD = before


def norm_rope_registered() -> None:
    """The registered operation, which compiled layers call, with its gradients; torch checks its fake form."""
    from engine.kernels.norm_rope import _norm_rope_backward_op, _norm_rope_op

    q, k = (torch.randn(2, 3, heads, 16, device=DEVICE).requires_grad_() for heads in (4, 2))
    weights = [torch.rand(16, device=DEVICE).requires_grad_() for _ in range(2)]
    angles = torch.randn(2, 3, 8, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def plain(q, k, *w):
        return norm_rope_reference(q, k, *w, cos.to(q.dtype), sin.to(q.dtype))

    compare(
        "norm_rope registered",
        lambda q, k, *w: _norm_rope_op(q, k, *w, cos, sin, 1e-6, False),
        plain,
        [q, k, *weights],
        2,
    )
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_norm_rope_op, (q, k, *weights, cos, sin, 1e-6, False), test_utils=checks)
    frozen = [q.detach(), k.detach(), *(weight.detach() for weight in weights), cos, sin]
    torch.library.opcheck(
        _norm_rope_backward_op, (torch.randn_like(q), torch.randn_like(k), *frozen, 1e-6, False, False),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    print("ok   norm_rope registered: schema, autograd, fake form")


def linear_cross_entropy_cases() -> None:
    shapes = [(7, 8, 50), (64, 16, 700)] if INTERPRETED else [(7, 64, 500), (1000, 256, 5003), (3000, 1024, 32_001)]
    settings = [{}, {"soft_cap": 5.0}, {"label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 0.5}]
    for dtype, (rows, hidden, vocabulary), extra in itertools.product(DTYPES, shapes, settings):
        for trained, biased in ((True, False), (False, False), (False, True)):
            h = torch.randn(rows, hidden, device=DEVICE).to(dtype).requires_grad_()
            w = (torch.randn(vocabulary, hidden, device=DEVICE) * hidden**-0.5).to(dtype).requires_grad_(trained)
            bias = torch.randn(vocabulary, device=DEVICE).to(dtype) if biased else None
            targets = torch.randint(vocabulary, (rows,), device=DEVICE)
            targets[::3] = -100

            def call(function, h, w, bias=bias, targets=targets, extra=extra, **more):
                return function(h, w, targets, bias=None if bias is None else bias.to(h.dtype), **extra, **more)

            compare(
                f"linear_cross_entropy {dtype} {rows}x{hidden}x{vocabulary} trained={trained} bias={biased} {extra}",
                lambda h, w, s=rows * 256 * h.element_size(): call(linear_cross_entropy, h, w, workspace_bytes=s),
                lambda h, w: call(linear_cross_entropy_reference, h, w),
                [h, w],
                1,
                averaged=int((targets >= 0).sum()),
            )


def linear_cross_entropy_scaled() -> None:
    """float16 under a gradient scaler, the loss divided by the tokens of many batches: nothing is lost before the scale."""
    rows, hidden, vocabulary, tokens, scaler = 64, 16, 700, 2.0**20, 2.0**16
    for trained in (True, False):
        h = torch.randn(rows, hidden, device=DEVICE).half().requires_grad_()
        w = torch.randn(vocabulary, hidden, device=DEVICE).half().requires_grad_(trained)
        targets = torch.randint(vocabulary, (rows,), device=DEVICE)
        exact = [x.detach().double().requires_grad_(x.requires_grad) for x in (h, w)]
        (scaler * linear_cross_entropy_reference(*exact, targets, normaliser=tokens)).backward()
        (scaler * linear_cross_entropy(h, w, targets, normaliser=tokens)).backward()
        for name, ours, truth in zip(("hidden", "weight"), (h, w), exact, strict=True):
            if truth.grad is None:
                continue
            error = rms(ours.grad.double() - truth.grad) / rms(truth.grad)
            good = error < 2e-3
            print(
                f"{'ok  ' if good else 'FAIL'} linear_cross_entropy scaled, trained={trained} {name}: error {error:.2e}"
            )
            if not good:
                FAILURES.append(f"linear_cross_entropy scaled {name}")


def linear_logp_cases() -> None:
    shapes = [(7, 8, 50), (40, 16, 700)] if INTERPRETED else [(7, 64, 500), (1000, 256, 5003), (3000, 1024, 32_001)]
    settings = [{}, {"soft_cap": 5.0, "temperature": 0.7}, {"logit_scale": 0.5}]
    for dtype, (rows, hidden, vocabulary), extra in itertools.product(DTYPES, shapes, settings):
        for trained, biased, entropy in (
            (True, True, True),
            (True, False, False),
            (False, True, True),
            (False, False, False),
        ):
            h = torch.randn(rows, hidden, device=DEVICE).to(dtype).requires_grad_()
            w = (torch.randn(vocabulary, hidden, device=DEVICE) * hidden**-0.5).to(dtype).requires_grad_(trained)
            bias = [torch.randn(vocabulary, device=DEVICE).to(dtype).requires_grad_(trained)] if biased else []
            targets = torch.randint(vocabulary, (rows,), device=DEVICE)

            def call(function, h, w, *bias, targets=targets, extra=extra, entropy=entropy, **more):
                scores = function(h, w, targets, bias=bias[0] if bias else None, **extra, **more)
                return scores[:2] if entropy else scores[0]

            name = f"linear_logp {dtype} {rows}x{hidden}x{vocabulary} trained={trained} bias={biased} {extra}"
            room = 16 * vocabulary * h.element_size()
            compare(
                name,
                lambda *x, room=room: call(linear_logp, *x, workspace_bytes=room),
                lambda *x: call(linear_logp_reference, *x),
                [h, w, *bias],
                2 if entropy else 1,
            )
            with torch.no_grad():
                rest = linear_logp(h, w, targets, bias=bias[0] if bias else None, workspace_bytes=room, **extra)
                truth = linear_logp_reference(h, w, targets, bias=bias[0] if bias else None, **extra)
                wide = [x.double() for x in (h, w, *bias)]
                exact = linear_logp_reference(*wide[:2], targets, bias=wide[2] if bias else None, **extra)
            for field, terms in (("log_sum_sq_probs", 0), ("mean_logits", vocabulary)):
                found = (getattr(scores, field) for scores in (exact, truth, rest))
                judge(f"{name} {field}", *found, dtype, terms)
            agree = float((rest.is_top1 == truth.is_top1).float().mean())
            if agree < (1.0 if dtype == torch.float32 else 0.99):
                print(f"FAIL {name} is_top1 agrees for {agree:.3f} of the rows")
                FAILURES.append(name)


def all_ignored() -> None:
    h = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    w = torch.randn(50, 8, device=DEVICE, requires_grad=True)
    loss = linear_cross_entropy(h, w, torch.full((4,), -100, device=DEVICE))
    loss.backward()
    good = float(loss.detach()) == 0 and not h.grad.any() and not w.grad.any()
    print("ok   all rows ignored" if good else "FAIL all rows ignored")
    if not good:
        FAILURES.append("all ignored")


WIDE = ("logp_entropy_cases", "norm_rope_cases", "linear_cross_entropy_cases", "linear_logp_cases")
CHECKS = (
    *WIDE,
    "logp_entropy_in_place",
    "norm_rope_blocks",
    "norm_rope_registered",
    "linear_cross_entropy_scaled",
    "all_ignored",
)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(INTERPRETED)  # fills fresh memory with NaN, so an unwritten element shows
    for name in sys.argv[1:] or CHECKS:
        check, _, dtype = name.partition(":")
        if dtype:
            DTYPES[:] = [getattr(torch, dtype)]
        globals()[check]()
    print(f"{len(FAILURES)} failed")
    sys.exit(bool(FAILURES))
