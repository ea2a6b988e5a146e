"""The checks that every device runs: the error-ratio test against float64, over odd shapes, strides and settings.

Run as a script it checks the kernels on CUDA, or in Triton's interpreter with TRITON_INTERPRET=1, all of them or those
named (`linear_logp_cases:bfloat16`: in this number format alone); it prints a line a case and exits 1 if one fails. The
tests call it in a process of its own for the interpreter, because Triton reads that variable once. A card runs every
combination, or of very many those in which each three values occur; the interpreter, which takes a millisecond where a card
takes none, runs combinations in which each pair of values occurs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import process_time
from typing import Any

import torch

from engine.kernels.linear_cross_entropy import linear_cross_entropy
from engine.kernels.linear_logp import OUTPUTS, linear_logp
from engine.kernels.logp_entropy import logp_entropy, logp_entropy_reference
from engine.kernels.norm_rope import norm_rope, norm_rope_reference
from engine.kernels.rope import rope
from tests.engine.kernels.experts_cases import (
    experts_cases,
    experts_crosses,
    experts_decoded,
    experts_empty,
    experts_far,
    experts_formats,
    experts_packed,
    experts_plan,
    experts_registered,
)
from tests.engine.kernels.fp8_cases import fp8_rows_cases, fp8_rows_numbers
from tests.engine.kernels.gated_cases import gated_again, gated_cases, gated_registered, gated_tiles
from tests.engine.kernels.gated_sums_cases import (
    gated_sums_again,
    gated_sums_cases,
    gated_sums_registered,
    gated_sums_tiles,
)
from tests.engine.kernels.head_cases import (
    linear_cross_entropy_cases,
    linear_cross_entropy_scaled,
    linear_logp_cases,
    linear_logp_numbers,
    linear_logp_tiles,
    slices_that_wait,
)
from tests.engine.kernels.hostile_cases import (
    beyond_2_to_the_31,
    caps_far_above,
    computed_again,
    overwritten_logits,
    second_derivatives,
    trained_angles,
    words_that_cannot_come,
)
from tests.engine.kernels.judging import (
    DEVICE,
    DTYPES,
    FAILURES,
    INTERPRETED,
    combined,
    compare,
    not_deterministic,
    rms,
    said,
)
from tests.engine.kernels.rope_cases import rope_blocks, rope_cases, rope_registered, rope_twice, rope_views

VIEWS = {
    "slice": lambda x: x[:, :-1],
    "transposed": lambda x: x.mT.contiguous().mT[:, 1:],
    "every second": lambda x: x.repeat_interleave(2, -1)[:, 1:, ::2],
}


def logp_entropy_cases() -> None:
    shapes = [(1, 3, 37), (2, 5, 101)] if INTERPRETED else [(1, 3, 37), (2, 33, 5003), (2, 64, 151_936)]
    for (batch, time, vocabulary), dtype, temperature, label in combined(shapes, DTYPES, (1.0, 0.7), list(VIEWS)):
        logits = (3 * torch.randn(batch, time + 1, vocabulary, device=DEVICE)).to(dtype).requires_grad_()
        targets = torch.randint(vocabulary, (batch, time), device=DEVICE)
        targets[0, 0] = -100
        compare(
            f"logp_entropy {dtype} {batch}x{time}x{vocabulary} T={temperature} {label}",
            lambda x, view=VIEWS[label], t=temperature, y=targets: logp_entropy(view(x), y, temperature=t),
            lambda x, view=VIEWS[label], t=temperature, y=targets: logp_entropy_reference(view(x), y, temperature=t),
            [logits],
            2,
            between=rms((logits.double() / temperature).logsumexp(-1)),
        )


def logp_entropy_in_place() -> None:
    logits = torch.randn(2, 2, 61, device=DEVICE)
    targets = torch.randint(61, (2, 2), device=DEVICE)
    kept, spent = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logp_entropy(kept, targets)[0].sum().backward()
    logp_entropy(spent, targets, inplace_gradient=True)[0].sum().backward()
    same = torch.equal(kept.grad, spent.grad) and spent.grad.data_ptr() == spent.data_ptr()
    said(same, "logp_entropy in place")


def norm_rope_cases() -> None:
    shapes = [(2, 2, 4, 2, 16, 16), (1, 3, 3, 1, 24, 8)]
    if not INTERPRETED:
        shapes += [(2, 257, 32, 8, 128, 128), (1, 100, 16, 2, 256, 64), (2, 65, 5, 5, 80, 80)]
    for shape, dtype, offset, scaled in combined(shapes, DTYPES, (False, True), (True, False)):
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
    """Fewer heads a program than there are, and a last program that is not full; weights that lie apart in memory."""
    import engine.kernels.norm_rope as package

    before = package.FORWARD, package.BACKWARD
    package.FORWARD, package.BACKWARD = (replace(tiles, candidates=((2, 1),)) for tiles in before)
    q, k = (torch.randn(1, 2, heads, 24, device=DEVICE).requires_grad_() for heads in (5, 3))
    weights = [torch.rand(24, device=DEVICE).requires_grad_() for _ in range(2)]
    angles = torch.randn(1, 2, 8, device=DEVICE)

    def call(function, q, k, *w):
        w = (x.repeat_interleave(2)[::2] for x in w)
        return function(q, k, *w, angles.cos().to(q.dtype), angles.sin().to(q.dtype))

    compare(
        "norm_rope in blocks of heads",
        lambda *x: call(norm_rope, *x),
        lambda *x: call(norm_rope_reference, *x),
        [q, k, *weights],
        2,
    )
    with not_deterministic():
        compare(
            "norm_rope with few rows of partial sums",
            lambda *x: call(norm_rope, *x),
            lambda *x: call(norm_rope_reference, *x),
            [q, k, *weights],
            2,
        )
    package.FORWARD, package.BACKWARD = before


def norm_rope_as_gradients_lie() -> None:
    """Gradients token by token, head by head (as flash, cuDNN or plain attention give them), expanded, and with a head's
    numbers apart: the same to the bit, and none but the last copied."""
    for size, rotated in ((16, 16), (24, 8)) if INTERPRETED else ((128, 128), (256, 64), (80, 80)):
        time = 3 if INTERPRETED else 65
        q, k = (torch.randn(2, time, heads, size, device=DEVICE).requires_grad_() for heads in (4, 2))
        weight, angles = torch.rand(size, device=DEVICE), torch.randn(1, time, rotated, device=DEVICE)
        given = [torch.randn_like(x) for x in (q, k)]
        layouts = {
            "head by head": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
            "rows last": lambda x: x.movedim(0, 2).contiguous().movedim(2, 0),
            "apart": lambda x: x.mT.contiguous().mT,
        }
        out = norm_rope(q, k, weight, weight, angles.cos(), angles.sin())
        wanted = torch.autograd.grad(out, (q, k), given, retain_graph=True)
        for name, lay in layouts.items():
            found = torch.autograd.grad(out, (q, k), [lay(x) for x in given], retain_graph=True)
            said(all(map(torch.equal, found, wanted)), f"norm_rope of {size}: gradients {name}")
        ones = torch.autograd.grad(out[0].sum() + out[1].sum(), (q, k), retain_graph=True)
        wanted = torch.autograd.grad(out, (q, k), [torch.ones_like(x) for x in out])
        said(all(map(torch.equal, ones, wanted)), f"norm_rope of {size}: gradients expanded")


def norm_rope_of_queries() -> None:
    """Queries of a layer that has no keys of its own: as beside keys, and no gradient from what is not there."""
    from engine.kernels.norm_rope import _norm_rope_op

    q, none = torch.randn(2, 3, 5, 16, device=DEVICE).requires_grad_(), torch.randn(2, 3, 1, 16, device=DEVICE)
    weight, angles = torch.rand(16, device=DEVICE).requires_grad_(), torch.randn(1, 3, 16, device=DEVICE)

    def turned(function, q, w):
        return function(q, q[:, :, :0], w, w, angles.cos().to(q.dtype), angles.sin().to(q.dtype))[0]

    compare(
        "norm_rope of queries",
        lambda *x: turned(norm_rope, *x),
        lambda *x: turned(norm_rope_reference, *x),
        [q, weight],
        1,
    )
    both = norm_rope(q, none, weight, weight, angles.cos(), angles.sin())[0]
    registered = _norm_rope_op(q, q[:, :, :0], weight, weight, angles.cos(), angles.sin(), 1e-6, False)[0]
    alone = turned(norm_rope, q, weight)
    near = all(torch.allclose(alone, each, rtol=1e-6, atol=1e-6) for each in (both, registered))
    said(near, "norm_rope of queries beside keys and without")
    found = [torch.autograd.grad(x.square().sum(), (q, weight)) for x in (alone, registered)]
    near = all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(*found, strict=True))
    said(near, "norm_rope of queries registered")


def norm_rope_deterministic() -> None:
    """On a card, where programs end in any order: the weights' gradient is the same to the bit each time."""
    if INTERPRETED:
        return
    q, k = (torch.randn(4, 2048, heads, 128, device=DEVICE).bfloat16().requires_grad_() for heads in (32, 8))
    weights = [torch.rand(128, device=DEVICE).requires_grad_() for _ in range(2)]
    angles = torch.randn(1, 2048, 128, device=DEVICE)
    torch.use_deterministic_algorithms(True)
    found = []
    for _ in range(5):
        out = norm_rope(q, k, *weights, angles.cos(), angles.sin())
        found.append(torch.autograd.grad(sum(x.float().square().sum() for x in out), weights))
    torch.use_deterministic_algorithms(False)
    said(
        all(torch.equal(a, b) for each in found for a, b in zip(found[0], each, strict=True)), "norm_rope deterministic"
    )


def norm_rope_registered() -> None:
    """The registered operation, which compiled layers call, with its gradients; torch checks its fake form."""
    from engine.kernels.norm_rope import _norm_rope_backward_op, _norm_rope_op

    q, k = (torch.randn(1, 2, heads, 16, device=DEVICE).requires_grad_() for heads in (4, 2))
    weights = [torch.rand(16, device=DEVICE).requires_grad_() for _ in range(2)]
    angles = torch.randn(1, 2, 8, device=DEVICE).repeat(1, 1, 2)
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


def unknown_targets() -> None:
    """A target that is no word of the vocabulary makes its row NaN on every path, and no other row."""
    h, w = torch.randn(3, 8, device=DEVICE), torch.randn(50, 8, device=DEVICE)
    for wrong in (50, -1):
        targets = torch.tensor([3, wrong, 49], device=DEVICE)
        found = {
            "linear_logp": linear_logp(h, w, targets, outputs=("cross_entropy",)).cross_entropy,
            "logp_entropy": logp_entropy(h @ w.t(), targets)[0],
        }
        for name, rows in found.items():
            said(rows.isnan().tolist() == [False, True, False], f"{name} of a target {wrong} outside the vocabulary")
        for trained in (True, False):
            loss = linear_cross_entropy(h.requires_grad_(), w.requires_grad_(trained), targets)
            said(bool(loss.isnan()), f"linear_cross_entropy of a target {wrong}, trained={trained}")


def far_apart() -> None:
    """Elements of one tensor more than 2^31 apart: rows in one case, words of a row in the other."""
    apart = 2**31 + 64
    for name, strides, size in (
        ("rows", (0, apart, 1), apart + 64),
        ("words", (0, 1, apart // 2), 9 * (apart // 2) + 64),
    ):
        with sparse(size) as storage:
            far = storage.as_strided((1, 2, 9), strides)
            near = torch.randn(1, 2, 9, device=DEVICE)
            far.copy_(near)
            near = far.clone()
            targets = torch.tensor([[1, 8]], device=DEVICE)
            logp, spread = logp_entropy(far.requires_grad_(), targets, inplace_gradient=True)
            truth = [x.detach() for x in logp_entropy_reference(near.requires_grad_(), targets)]
            close = all(torch.allclose(a, b, atol=1e-5) for a, b in zip((logp, spread), truth, strict=True))
            said(close, f"logp_entropy with {name} 2^31 elements apart")
            (gradient,) = torch.autograd.grad(logp.sum() + spread.sum(), far)
            (expected,) = torch.autograd.grad(sum(x.sum() for x in logp_entropy_reference(near, targets)), near)
            good = torch.allclose(gradient.float(), expected.float(), atol=1e-3)
            said(good, f"logp_entropy's gradient with {name} 2^31 elements apart")


@contextmanager
def sparse(size: int) -> Iterator[torch.Tensor]:
    """float16 elements of which only those touched take memory: a file with holes, or a card's own memory."""
    if DEVICE == "cuda":
        yield torch.empty(size, dtype=torch.float16, device=DEVICE)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(2 * size)
        yield torch.from_file(file.name, shared=True, size=size, dtype=torch.float16)


def all_ignored() -> None:
    h = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    w = torch.randn(50, 8, device=DEVICE, requires_grad=True)
    none = torch.full((4,), -100, device=DEVICE)
    for name, op in (
        ("linear_cross_entropy", lambda: linear_cross_entropy(h, w, none)),
        ("linear_logp", lambda: linear_logp(h, w, none, ignore_index=-100, outputs=("cross_entropy",))[5].sum()),
        ("logp_entropy", lambda: sum(x.sum() for x in logp_entropy(h @ w.t(), none))),
    ):
        h.grad = w.grad = None
        loss = op()
        loss.backward()
        said(float(loss.detach()) == 0 and not h.grad.any() and not w.grad.any(), f"{name}: all rows ignored")


def second_backward() -> None:
    """What waited for the first is used up: the second forms it again, and gives the same."""
    rows = 8 if INTERPRETED else 40
    h = torch.randn(rows, 8, device=DEVICE, requires_grad=True)
    targets = torch.arange(rows, device=DEVICE)
    for trained in (True, False):
        w = torch.randn(700, 8, device=DEVICE, requires_grad=trained)
        leaves = [h, w] if trained else [h]
        loss = linear_cross_entropy(h, w, targets, workspace_bytes=rows * 256 * 4)
        doubled = torch.autograd.grad(2 * loss, leaves, retain_graph=True)
        single = torch.autograd.grad(loss, leaves)
        # Products of other slices add in another order.
        same = all(rms(a - 2 * b) <= 1e-5 * rms(a) for a, b in zip(doubled, single, strict=True))
        said(same, f"linear_cross_entropy: a second backward pass gives the same, trained={trained}")
    targets, w = targets[:4], w.detach()
    h = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    for name, op in (
        ("linear_logp", lambda: linear_logp(h, w, targets, outputs=()).log_probs.sum()),
        ("logp_entropy", lambda: logp_entropy(h @ w.t(), targets)[0].sum()),
    ):
        out = op()
        both = [torch.autograd.grad(out, h, retain_graph=True)[0] for _ in range(2)]
        said(torch.equal(*both), f"{name}: a second backward pass gives the same")


def empty() -> None:
    """No rows at all: results of that shape, gradients of zero."""
    w = torch.randn(50, 8, device=DEVICE, requires_grad=True)
    for trained in (True, False):
        h = torch.randn(0, 8, device=DEVICE, requires_grad=True)
        none = torch.zeros(0, dtype=torch.long, device=DEVICE)
        scores = linear_logp(h, w.requires_grad_(trained), none, outputs=(*OUTPUTS, "cross_entropy"))
        (scores.log_probs.sum() + scores.entropy.sum() + linear_cross_entropy(h, w, none)).backward()
        good = all(x.shape == (0,) for x in scores) and h.grad.shape == (0, 8) and (w.grad is None or not w.grad.any())
        said(good, f"linear_logp and linear_cross_entropy without a row, trained={trained}")
        w.grad = None
    logp, spread = logp_entropy(
        torch.randn(2, 0, 50, device=DEVICE), torch.zeros(2, 0, dtype=torch.long, device=DEVICE)
    )
    said(logp.shape == spread.shape == (2, 0), "logp_entropy without a row")
    turns = torch.randn(2, 1, 0, 8, device=DEVICE)
    q, k = norm_rope(*(torch.randn(2, 0, n, 8, device=DEVICE) for n in (4, 2)), None, None, *turns)
    said((q.shape, k.shape) == ((2, 0, 4, 8), (2, 0, 2, 8)), "norm_rope without a token")
    for name, op in (("rope", rope), ("norm_rope", lambda q, k, *turns: norm_rope(q, k, None, None, *turns))):
        for tokens, of_k in ((0, 2), (3, 0)):
            turns = torch.randn(2, 1, tokens, 8, device=DEVICE)
            q, k = (torch.randn(2, tokens, n, 8, device=DEVICE).requires_grad_() for n in (4, of_k))
            out = op(q, k, *turns)
            torch.autograd.backward(out, [torch.ones_like(x) for x in out])
            good = [x.shape for x in out] == [x.grad.shape for x in (q, k)] == [(2, tokens, 4, 8), (2, tokens, of_k, 8)]
            said(good, f"{name} of {tokens} tokens and {of_k} heads of k")


def registered() -> None:
    """The operations that compiled code calls: numbers of the eager form, and torch's checks of their fake forms."""
    from engine.kernels.linear_logp.registered import _NONE, linear_logp_op
    from engine.kernels.logp_entropy.registered import logp_entropy_op

    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    logits = torch.randn(1, 2, 37, device=DEVICE).requires_grad_()
    targets = torch.tensor([3, -100], device=DEVICE)
    torch.library.opcheck(logp_entropy_op, (logits, targets, 0.7, True, -100), test_utils=checks)
    ours = logp_entropy_op(logits, targets, 0.7, True, -100)[:2]
    theirs = logp_entropy(logits[0], targets, temperature=0.7)
    gradients = [torch.autograd.grad(a.sum() + 0.3 * b.sum(), logits)[0] for a, b in (ours, theirs)]
    said(all(map(torch.equal, (*ours, gradients[0]), (*theirs, gradients[1]))), "logp_entropy registered")
    h, w = torch.randn(2, 8, device=DEVICE).requires_grad_(), torch.randn(37, 8, device=DEVICE)
    for trained, early in ((True, False), (False, True)):
        w.requires_grad_(trained)
        numbers, outputs = [0.7, 0.0, 1.0, 0.1, 1e-3], "entropy,cross_entropy"
        given = (h, w, None, targets, numbers, 1 << 20, outputs, -100, early)
        torch.library.opcheck(linear_logp_op, given, test_utils=checks)
        found = linear_logp_op(*given)
        same = linear_logp(
            h, w, targets, temperature=0.7, label_smoothing=0.1, z_loss=1e-3, ignore_index=-100,
            outputs=tuple(outputs.split(",")),
        )  # fmt: skip
        leaves = [h, w] if trained else [h]
        pairs = [(found[1], found[5]), (same.entropy, same.cross_entropy)]
        gradients = [torch.autograd.grad(a.sum() + b.sum(), leaves, retain_graph=True) for a, b in pairs]
        early_only = [torch.autograd.grad(x.sum(), h)[0] for x in (found[5], same.cross_entropy)]
        both = zip((*pairs[0], *gradients[0], early_only[0]), (*pairs[1], *gradients[1], early_only[1]), strict=True)
        # Before a trained head the graph's forward pass goes by rows and the other by slices.
        worst = max(rms(a - b) / rms(b) for a, b in both)
        said(worst <= (1e-5 if trained else 0.0), f"linear_logp registered, trained={trained}", f"{worst:.1e} apart")
    whole = linear_logp_op(h, w, None, targets.clamp(min=0), [1.0, 0.0, 1.0, 0.0, 0.0], 1 << 20, "", _NONE, False)
    said(whole[0].shape == (2,) and whole[1].numel() == 0, "linear_logp registered without a choice")


WIDE = {
    each.__name__: each
    for each in (
        logp_entropy_cases,
        norm_rope_cases,
        rope_cases,
        linear_cross_entropy_cases,
        linear_logp_cases,
        slices_that_wait,
        gated_cases,
        gated_sums_cases,
        experts_cases,
    )
}
"""Cases that run in each number format."""
CHECKS = WIDE | {
    each.__name__: each
    for each in (
        linear_logp_numbers,
        linear_logp_tiles,
        logp_entropy_in_place,
        norm_rope_blocks,
        norm_rope_as_gradients_lie,
        norm_rope_of_queries,
        norm_rope_deterministic,
        norm_rope_registered,
        rope_views,
        rope_blocks,
        rope_registered,
        rope_twice,
        fp8_rows_cases,
        fp8_rows_numbers,
        gated_again,
        gated_tiles,
        gated_registered,
        gated_sums_again,
        gated_sums_tiles,
        gated_sums_registered,
        experts_crosses,
        experts_plan,
        experts_registered,
        experts_empty,
        experts_far,
        experts_formats,
        experts_packed,
        experts_decoded,
        registered,
        linear_cross_entropy_scaled,
        unknown_targets,
        far_apart,
        all_ignored,
        second_backward,
        second_derivatives,
        computed_again,
        caps_far_above,
        trained_angles,
        overwritten_logits,
        words_that_cannot_come,
        beyond_2_to_the_31,
        empty,
    )
}
FAR = "experts_far", "far_apart", "beyond_2_to_the_31"
"""Cases over elements of one tensor that lie further apart than 32 bits tell, which on a card take gigabytes each."""


def check(names: Sequence[str]) -> list[str]:
    """Runs these cases, each named alone or with its number format, and prints a line for each; what failed."""
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    formats = list(DTYPES)
    FAILURES.clear()
    for name in names:
        case, _, dtype = name.partition(":")
        DTYPES[:] = [getattr(torch, dtype)] if dtype else formats
        begun = process_time()
        try:
            CHECKS[case]()
        finally:
            DTYPES[:] = formats
        print(f"ok   {case} took {process_time() - begun:.2f} s of CPU")
    return list(FAILURES)


def patch_the_language_once() -> None:
    """Triton's interpreter looks through its whole language, and replaces each name, at each call of a function within a kernel,
    though the kernel's own call has done so: a fifth of the time."""
    from triton import language
    from triton.runtime import interpreter

    patch, untouched = interpreter._patch_lang, getattr(interpreter, "_LangPatchScope", lambda: None)

    def once(function: Any) -> Any:
        known = [each for each in (language, language.core) if any(each is it for it in function.__globals__.values())]
        if known and not any(language.core.is_builtin(each.load) for each in known):
            return untouched()
        return patch(function)

    interpreter._patch_lang = once


if __name__ == "__main__":
    if INTERPRETED:
        patch_the_language_once()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(INTERPRETED)  # fills fresh memory with NaN, so an unwritten element shows
    # The interpreter computes masked lanes too, where numpy finds infinities less infinities.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    failed = check(sys.argv[1:] or list(CHECKS))
    print(f"{len(failed)} failed")
    sys.exit(bool(failed))
