"""The two orders of work: chunks of rows for a frozen head, slices of the vocabulary for a trained one.

Both return the summed loss [1] and gradients already multiplied by `scale` [1]. Names: N rows, H hidden, V vocabulary,
C rows of a chunk, S words of a slice.
"""

from __future__ import annotations

import torch


def _flags(settings: dict, bias_V: torch.Tensor | None) -> tuple[dict, tuple]:
    cap = settings["soft_cap"]
    flags = {"HAS_BIAS": bias_V is not None, "HAS_CAP": cap is not None}
    return flags, (settings["logit_scale"], cap or 1.0)


def _block(n: int, most: int) -> int:
    return min(most, 1 << max(n - 1, 0).bit_length())


def frozen_head(rows_NH, weight_VH, targets_N, bias_V, scale, workspace_bytes, need_hidden, settings):
    """Two products a chunk. Chunks are whole multiples of 128 rows: the product's tile, or it runs half empty."""
    from engine.kernels.linear_cross_entropy.kernels import row_loss_kernel

    count, vocabulary = rows_NH.shape[0], weight_VH.shape[0]
    chunk = max(workspace_bytes // (vocabulary * rows_NH.element_size()), 128) // 128 * 128
    chunk = -(-count // -(-count // min(chunk, count)))
    losses = torch.empty(count, dtype=torch.float32, device=rows_NH.device)
    d_hidden = torch.empty_like(rows_NH) if need_hidden else None
    flags, numbers = _flags(settings, bias_V)
    logits_CV = rows_NH.new_empty(min(chunk, count), vocabulary)
    for start in range(0, count, chunk):
        part = slice(start, min(start + chunk, count))
        logits = logits_CV[: part.stop - part.start]
        torch.mm(rows_NH[part], weight_VH.t(), out=logits)
        row_loss_kernel[(logits.shape[0],)](
            logits, targets_N[part], bias_V if bias_V is not None else logits, losses[part], scale,
            logits.stride(0), vocabulary, settings["ignore_index"], *numbers,
            settings["label_smoothing"], settings["z_loss"], **flags,
            HAS_SMOOTHING=settings["label_smoothing"] > 0, WITH_GRADIENT=need_hidden,
            LANES=_block(-(-vocabulary // 8), 512), RUN=8, num_warps=4,
        )  # fmt: skip
        if d_hidden is not None:
            torch.mm(logits, weight_VH, out=d_hidden[part])
    return losses.sum().reshape(1), d_hidden


def trained_head(rows_NH, weight_VH, targets_N, bias_V, scale, workspace_bytes, need_hidden, settings):
    """Statistics of every slice, then gradients; logits of the first slices wait inside the weight gradient's memory.

    With c = S x H the size of a slice's weight gradient, slice j's logits wait at [jNS, (j+1)NS) and its gradient will
    fill [jc, (j+1)c). For N >= H, going upward, no gradient lands on logits still to be read but for slice 0's own:
    the gradient of the logits therefore goes to the workspace, never in place.
    """
    count, hidden = rows_NH.shape
    vocabulary = weight_VH.shape[0]
    d_weight = torch.empty_like(weight_VH)
    d_rows = torch.zeros(count, hidden, dtype=torch.float32, device=rows_NH.device) if need_hidden else None
    words = min(max(workspace_bytes // (count * rows_NH.element_size()), 256) // 256 * 256, vocabulary)
    waiting = min(d_weight.numel() // (count * words), vocabulary // words) if count >= hidden else 0
    shelf = d_weight.view(-1)[: waiting * count * words].view(waiting, count, words)
    work = rows_NH.new_empty(count, words)
    statistics = _Statistics(count, rows_NH.device, settings, bias_V)
    slices = [(j, first, min(first + words, vocabulary)) for j, first in enumerate(range(0, vocabulary, words))]

    for j, first, end in slices:
        logits = shelf[j] if j < waiting else work[:, : end - first]
        torch.mm(rows_NH, weight_VH[first:end].t(), out=logits)
        statistics.fold(logits, targets_N, first)
    lse = statistics.lse()
    for j, first, end in slices:
        gradient = work[:, : end - first]
        if j < waiting:
            logits = shelf[j]
        else:
            logits = torch.mm(rows_NH, weight_VH[first:end].t(), out=gradient)
        statistics.gradient(logits, gradient, targets_N, lse, scale, first, vocabulary)
        if d_rows is not None:
            _accumulate(d_rows, gradient, weight_VH[first:end])
        torch.mm(gradient.t(), rows_NH, out=d_weight[first:end])
    return statistics.loss(lse, vocabulary), d_rows.to(rows_NH.dtype) if d_rows is not None else None, d_weight


def _accumulate(d_rows_NH: torch.Tensor, gradient_NS: torch.Tensor, weight_SH: torch.Tensor) -> None:
    """`d_rows += gradient @ weight`, summed in float32 also between slices."""
    if d_rows_NH.is_cuda and gradient_NS.dtype != torch.float32:
        torch.addmm(d_rows_NH, gradient_NS, weight_SH, out_dtype=torch.float32, out=d_rows_NH)
    else:
        d_rows_NH.addmm_(gradient_NS.float(), weight_SH.float())


class _Statistics:
    """Running maximum, sum of exponentials, sum of logits and target logit of each row."""

    def __init__(self, count: int, device: torch.device, settings: dict, bias_V: torch.Tensor | None) -> None:
        self.settings, self.bias = settings, bias_V
        self.high = torch.full((count,), float("-inf"), device=device)
        self.total, self.summed = (torch.zeros(count, device=device) for _ in range(2))
        # A target in no slice leaves NaN: a wrong number would go unseen.
        self.target = torch.full((count,), float("nan"), device=device)
        self.flags, self.numbers = _flags(settings, bias_V)

    def fold(self, logits_NS: torch.Tensor, targets_N: torch.Tensor, first: int) -> None:
        from engine.kernels.linear_cross_entropy.kernels import slice_statistics_kernel

        count, width = logits_NS.shape
        slice_statistics_kernel[(count,)](
            logits_NS, targets_N, self.bias if self.bias is not None else logits_NS,
            self.high, self.total, self.summed, self.target, logits_NS.stride(0), first, width,
            self.settings["ignore_index"], *self.numbers, **self.flags,
            WITH_SUM=self.settings["label_smoothing"] > 0, BLOCK_V=_block(width, 4096), num_warps=8,
        )  # fmt: skip

    def lse(self) -> torch.Tensor:
        return self.high + self.total.log()

    def gradient(self, logits_NS, out_NS, targets_N, lse, scale, first, vocabulary) -> None:
        from engine.kernels.linear_cross_entropy.kernels import slice_gradient_kernel

        count, width = out_NS.shape
        block = _block(width, 2048)
        slice_gradient_kernel[(count, -(-width // block))](
            logits_NS, out_NS, targets_N, self.bias if self.bias is not None else logits_NS, lse, scale,
            logits_NS.stride(0), out_NS.stride(0), first, width, vocabulary, self.settings["ignore_index"],
            *self.numbers, self.settings["label_smoothing"], self.settings["z_loss"], **self.flags,
            BLOCK_V=block, num_warps=4,
        )  # fmt: skip

    def loss(self, lse: torch.Tensor, vocabulary: int) -> torch.Tensor:
        smoothing = self.settings["label_smoothing"]
        each = lse - (1 - smoothing) * self.target - smoothing * self.summed / vocabulary
        return (each + self.settings["z_loss"] * lse.square()).sum().reshape(1)
