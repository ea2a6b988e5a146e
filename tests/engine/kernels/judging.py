"""The error-ratio test against float64, in a handful of combinations for the interpreter and in all of them for a card."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FAILURES: list[str] = []
"""The lines of cases that were not right."""
MANY = 100
"""Combinations of a case that a card runs all of: the losses from hidden states have 768 in each number format."""


def said(good: bool, name: str, words: str = "") -> None:
    line = f"{'ok  ' if good else 'FAIL'} {name}{': ' if words else ''}{words}"
    print(line)
    if not good:
        FAILURES.append(line)


def other_format() -> bool:
    """Whether a card is asked for one format alone, and not for the one that models are trained in: the code is the same."""
    return not INTERPRETED and DTYPES in ([torch.float32], [torch.float16])


def combined(*axes: Sequence[Any], together: int | None = None) -> Iterator[tuple[Any, ...]]:
    """Every combination on a card, but of more than `MANY` so many that each three values of three axes occur together
    (`EVERY=1` in the environment: all); in the interpreter, and on a card in another format alone, so many that each pair of
    values of two axes occurs. `together` says how many values occur together where a card compiles each combination anew."""
    places = [range(len(axis)) for axis in axes]
    left = list(itertools.product(*places))
    pairs = INTERPRETED or other_format()
    whole = len(left) <= MANY and not pairs and together is None
    every = not INTERPRETED and (os.environ.get("EVERY") == "1" or whole)
    together = 2 if INTERPRETED else together or (2 if pairs else 3)

    def met(at: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(at), together))

    unmet = set[tuple[tuple[int, int], ...]]().union(*map(met, left))
    while left and (unmet or every):
        best = left[0] if every else max(left, key=lambda at: len(met(at) & unmet))
        left.remove(best)
        unmet -= met(best)
        yield tuple(axis[i] for axis, i in zip(axes, best, strict=True))


def rms(x: torch.Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def judge(
    name: str,
    truth: torch.Tensor,
    eager: torch.Tensor,
    ours: torch.Tensor,
    step: torch.dtype,
    averaged: int = 0,
    between: float = 0.0,
    handful: bool = INTERPRETED,
    jump: float = 0.0,
) -> None:
    """Ours may be at most twice as far from the truth as plain torch in the same dtype.

    A mean over `averaged` logits of about one is small where they cancel, and its rounding may cancel by luck in either
    form: it is granted twice what independent roundings of its terms to `step` leave, and one rounding of its sum.
    A difference of numbers as large as `between` is granted four roundings of them to float32: plain torch may have none.
    What a gradient jumps by where numbers lie at a clamp is granted: rounded they come to lie on either side of it.
    A handful of rows may round by luck, and the interpreter cuts float32 to bfloat16 where a card rounds: half as much
    again, one step of bfloat16 and two of float16 are granted there.
    """
    size = rms(truth) + 1e-30
    luck = 2 * torch.finfo(step).eps / (12 * averaged) ** 0.5 + torch.finfo(torch.float32).eps if averaged else 0.0
    luck += 4 * torch.finfo(torch.float32).eps * between + jump
    few = max(torch.finfo(step).eps, 2e-3) * size if handful and step != torch.float32 else 0.0
    error, bound = (
        rms(ours.double() - truth),
        (3 if handful else 2) * rms(eager.double() - truth) + 2e-6 * size + luck + few,
    )
    good = error <= bound and bool(torch.isfinite(ours).all())
    said(good, name, f"error {error / size:.2e}, allowed {bound / size:.2e}")


def compare(
    name: str,
    op,
    reference,
    inputs: list[torch.Tensor],
    outputs: int,
    averaged: int = 0,
    between: float = 0.0,
    handful: bool = INTERPRETED,
    either: Sequence[Callable[..., Any]] = (),
) -> None:
    """Outputs and every input's gradient, under one random upstream gradient.

    A gradient of probabilities is off by as much of itself as their logits are, in absolute numbers, where they are
    computed again. `either` are the references with a clamp moved by a rounding either way: what their gradients differ by
    is of the numbers that may come to lie on the other side of it.
    """
    results = {}
    upstream: list[torch.Tensor] = []
    runs = [("truth", reference, torch.float64), ("eager", reference, None), ("ours", op, None)]
    for key, function, dtype in (*runs, *((f"clamp {i}", each, torch.float64) for i, each in enumerate(either))):
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
        kind, terms, scale = ("output", averaged, between) if i < outputs else ("gradient", 0, between * rms(truth))
        jump = rms(results["clamp 0"][i] - results["clamp 1"][i]) if either and i >= outputs else 0.0
        judge(f"{name} {kind} {i}", truth, eager, ours, inputs[0].dtype, terms, scale, handful, jump)


@contextmanager
def not_deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)
