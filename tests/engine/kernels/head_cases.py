"""The ops from hidden states and a head: each output and gradient, in each number format, with each setting."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from engine.kernels.linear_logp import OUTPUTS, linear_logp, linear_logp_reference
from tests.engine.kernels.judging import DEVICE, DTYPES, INTERPRETED, combined, compare, judge, rms, said


def linear_cross_entropy_cases() -> None:
    shapes = [(7, 8, 50), (5, 16, 37)] if INTERPRETED else [(7, 64, 500), (1000, 256, 5003), (3000, 1024, 32_001)]
    settings = [{}, {"soft_cap": 5.0}, {"label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 0.5}]
    heads = [(True, False), (False, False), (False, True), (True, True)]
    for (rows, hidden, vocabulary), dtype, extra, (trained, biased) in combined(shapes, DTYPES, settings, heads):
        h = torch.randn(rows, hidden, device=DEVICE).to(dtype).requires_grad_()
        w = (torch.randn(vocabulary, hidden, device=DEVICE) * hidden**-0.5).to(dtype).requires_grad_(trained)
        bias = [torch.randn(vocabulary, device=DEVICE).to(dtype).requires_grad_(trained)] if biased else []
        targets = torch.randint(vocabulary, (rows,), device=DEVICE)
        targets[::3] = -100

        def call(function, h, w, *bias, targets=targets, extra=extra, **more):
            return function(h, w, targets, bias=bias[0].repeat_interleave(2)[::2] if bias else None, **extra, **more)

        compare(
            f"linear_cross_entropy {dtype} {rows}x{hidden}x{vocabulary} trained={trained} bias={biased} {extra}",
            lambda *x, s=rows * 256 * h.element_size(): call(linear_cross_entropy, *x, workspace_bytes=s),
            lambda *x: call(linear_cross_entropy_reference, *x),
            [h, w, *bias],
            1,
            averaged=int((targets >= 0).sum()),
        )


def linear_cross_entropy_scaled() -> None:
    """float16 under a gradient scaler, the loss divided by the tokens of many batches: nothing is lost before the scale."""
    rows, hidden, vocabulary, tokens, scaler = (9, 16, 61, 2.0**20, 2.0**16)
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
            said(error < 2e-3, f"linear_cross_entropy scaled, trained={trained} {name}", f"error {error:.2e}")


OUTPUT_CHOICES = [(), ("entropy",), ("cross_entropy",), ("cross_entropy", "entropy")]


def linear_logp_cases() -> None:
    """The op from hidden states with each choice of outputs; what is ignored, what lies apart in memory; flat and peaked."""
    shapes = [(5, 8, 50), (4, 16, 37)] if INTERPRETED else [(7, 64, 500), (1000, 256, 5003), (3000, 1024, 32_001)]
    settings = [
        {}, {"soft_cap": 5.0, "temperature": 0.7}, {"logit_scale": 0.5}, {"label_smoothing": 0.1, "z_loss": 1e-3}
    ]  # fmt: skip
    heads = [(True, True), (True, False), (False, True), (False, False)]
    for (rows, hidden, vocabulary), dtype, extra, (trained, biased), wanted, ignored, peak in combined(
        shapes, DTYPES, settings, heads, OUTPUT_CHOICES, (None, -100), (1.0, 12.0)
    ):
        h = (peak * torch.randn(hidden, rows, device=DEVICE)).to(dtype).t().requires_grad_()
        w = (torch.randn(vocabulary, hidden, device=DEVICE) * hidden**-0.5).to(dtype).requires_grad_(trained)
        bias = [torch.randn(vocabulary, device=DEVICE).to(dtype).requires_grad_(trained)] if biased else []
        targets = torch.randint(vocabulary, (2 * rows,), device=DEVICE)[::2]
        if ignored is not None:
            targets[::3] = ignored
        settled = {**extra, "ignore_index": ignored}

        def call(function, h, w, *bias, targets=targets, settled=settled, wanted=wanted, **more):
            apart = bias[0].repeat_interleave(2)[::2] if bias else None
            scores = function(h, w, targets, bias=apart, **settled, **more)
            return scores.log_probs, *(getattr(scores, field) for field in wanted)

        room = 2 * vocabulary * h.element_size() if INTERPRETED else 16 * vocabulary * h.element_size()
        outputs = (*wanted, "is_top1")
        compare(
            f"linear_logp {dtype} {rows}x{hidden}x{vocabulary} trained={trained} bias={biased} {wanted} {settled} x{peak}",
            lambda *x, room=room, outputs=outputs: call(linear_logp, *x, workspace_bytes=room, outputs=outputs),
            lambda *x: call(linear_logp_reference, *x),
            [h, w, *bias],
            1 + len(wanted),
            between=rms((h.double() @ w.double().t()[:, :4096]).amax(-1)),
            handful=rows < 64,
        )


def slices_that_wait() -> None:
    """A trained head whose logits wait in the weight gradient, in the workspace, in both, or are formed again."""
    rows, hidden, vocabulary = (5, 8, 600) if INTERPRETED else (3000, 512, 32_001)
    for dtype, buffers, biased in combined(DTYPES, (1, 3, 9), (True, False)):
        h = torch.randn(rows, hidden, device=DEVICE).to(dtype).requires_grad_()
        w = (torch.randn(vocabulary, hidden, device=DEVICE) * hidden**-0.5).to(dtype).requires_grad_()
        bias = [torch.randn(vocabulary, device=DEVICE).to(dtype).requires_grad_()] if biased else []
        targets = torch.randint(vocabulary, (rows,), device=DEVICE)
        outputs = ("entropy", "cross_entropy")

        def call(function, h, w, *bias, targets=targets, **more):
            scores = function(h, w, targets, bias=bias[0] if bias else None, z_loss=1e-3, **more)
            return scores.log_probs, scores.entropy, scores.cross_entropy

        room = rows * h.element_size() * (256 * buffers if INTERPRETED else -(-vocabulary // 9) * buffers)
        compare(
            f"linear_logp in slices {dtype} bias={biased} {buffers} in the workspace",
            lambda *x, room=room: call(linear_logp, *x, workspace_bytes=room, outputs=outputs),
            lambda *x: call(linear_logp_reference, *x),
            [h, w, *bias],
            3,
            handful=rows < 64,
        )
        with torch.no_grad():
            told = linear_logp(h, w, targets, outputs=OUTPUTS)
        kept = linear_logp(h, w, targets, outputs=OUTPUTS, workspace_bytes=room)
        for field in ("log_sum_sq_probs", "mean_logits"):
            error = rms(getattr(kept, field).double() - getattr(told, field)) / rms(getattr(told, field))
            said(error < 2e-3, f"linear_logp in slices {dtype} {field}", f"{error:.1e} from whole rows")
        agree = float((kept.is_top1 == told.is_top1).float().mean())
        said(agree >= 0.99, f"linear_logp in slices {dtype} is_top1", f"agrees for {agree:.3f} of the rows")


def linear_logp_numbers() -> None:
    """The outputs without a gradient."""
    rows, hidden, vocabulary = (6, 8, 50) if INTERPRETED else (1000, 256, 5003)
    settings = [{}, {"soft_cap": 5.0, "temperature": 0.7}, {"logit_scale": 0.5}]
    for dtype, extra, biased in combined(DTYPES, settings, (True, False)):
        h = torch.randn(rows, hidden, device=DEVICE).to(dtype)
        w = (torch.randn(vocabulary, hidden, device=DEVICE) * hidden**-0.5).to(dtype)
        bias = torch.randn(vocabulary, device=DEVICE).to(dtype) if biased else None
        targets = torch.randint(vocabulary, (rows,), device=DEVICE)
        targets[: rows // 2] = linear_logp_reference(h, w, targets, bias=bias, **extra).mean_logits.argmax()
        with torch.no_grad():
            ours = linear_logp(h, w, targets, bias=bias, **extra)
            eager = linear_logp_reference(h, w, targets, bias=bias, **extra)
            wide = None if bias is None else bias.double()
            truth = linear_logp_reference(h.double(), w.double(), targets, bias=wide, **extra)
        name = f"linear_logp {dtype} bias={biased} {extra}"
        for field, terms in (("log_sum_sq_probs", 0), ("mean_logits", vocabulary)):
            judge(f"{name} {field}", *(getattr(scores, field) for scores in (truth, eager, ours)), dtype, terms)
        agree = float((ours.is_top1 == eager.is_top1).float().mean())
        said(
            agree >= (1.0 if dtype == torch.float32 else 0.99), f"{name} is_top1", f"agrees for {agree:.3f} of the rows"
        )


def linear_logp_tiles() -> None:
    """Tiles smaller than a row, so that lanes fold several runs and several blocks meet in a row."""
    from engine.kernels.linear_logp import tiles

    before = tiles.ROW_TILES, tiles.GRADIENT_TILES
    tiles.ROW_TILES = replace(before[0], candidates=((4, 4, 1),))
    tiles.GRADIENT_TILES = replace(before[1], candidates=((16, 1),))
    for trained in (True, False):
        h, w = torch.randn(3, 8, device=DEVICE).requires_grad_(), torch.randn(50, 8, device=DEVICE)
        targets = torch.tensor([0, 17, 49], device=DEVICE)

        def call(function, h, w, targets=targets, **more):
            scores = function(h, w, targets, label_smoothing=0.1, **more)
            return scores.log_probs, scores.entropy, scores.cross_entropy

        outputs = ("entropy", "cross_entropy")
        compare(
            f"linear_logp in small tiles, trained={trained}",
            lambda *x, o=outputs: call(linear_logp, *x, outputs=o),
            lambda *x: call(linear_logp_reference, *x),
            [h, w.requires_grad_(trained)],
            3,
        )
    tiles.ROW_TILES, tiles.GRADIENT_TILES = before
