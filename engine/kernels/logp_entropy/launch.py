"""How the two kernels are launched: their tiles, and the width of indices, chosen from sizes at each launch."""

from __future__ import annotations

import torch

from engine.kernels.tuner import TUNER, Cost, Tile, Tiles, bucket


# Registers of a thread as compiled for an H100, by the logits it holds: 4.5 each forward, 5.5 backward.
def _forward_cost(tile: Tile) -> Cost:
    lanes, run, warps = tile
    return Cost(24 + 9 * (lanes * run // (32 * warps)) // 2, 32 * warps, 1024)


def _backward_cost(tile: Tile) -> Cost:
    block, warps = tile
    return Cost(16 + 11 * (block // (32 * warps)) // 2, 32 * warps)


# Measured on one H100 at V=151,936, 16,384 rows: forward 1.63 ms at 512 lanes of 8 words (1.87 at 1,024 with 4 warps),
# backward 3.57 ms at 1,024 words a program (4.28 at 8,192).
FORWARD = Tiles(
    "logp_entropy_fwd", 1, ("lanes", "run", "warps"),
    ((512, 8, 4), (256, 8, 4), (512, 8, 8), (1024, 8, 8), (512, 4, 4)), _forward_cost,
)  # fmt: skip
BACKWARD = Tiles(
    "logp_entropy_bwd", 1, ("block", "warps"), ((1024, 4), (512, 4), (1024, 2), (2048, 4), (2048, 8), (4096, 8)),
    _backward_cost,
)  # fmt: skip
_INT32 = 2**31


def wide(words: int, stride: int) -> bool:
    """Whether places inside a row of so many words need 64 bits; the last tile may reach one tile beyond the row."""
    most = max(tile[0] * tile[1] for tile in FORWARD.candidates)
    return (words + most) * abs(stride) >= _INT32


def forward(
    logits_BTV: torch.Tensor, targets_R: torch.Tensor, temperature: float, with_entropy: bool, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability, entropy (empty without) and log of the sum of exponentials in base 2, [R] float32 each."""
    from engine.kernels.logp_entropy.kernels import LOG2E, logp_entropy_fwd_kernel

    time, vocabulary = logits_BTV.shape[1:]
    rows = targets_R.numel()
    logp, lse = (torch.empty(rows, dtype=torch.float32, device=logits_BTV.device) for _ in range(2))
    entropy = torch.empty_like(logp) if with_entropy else logp.new_empty(0)
    stride = logits_BTV.stride(2)

    def launch(tile: Tile) -> None:
        lanes, run, warps = tile
        logp_entropy_fwd_kernel[(rows,)](
            logits_BTV, targets_R, logp, entropy, lse,
            time, vocabulary, *logits_BTV.stride(), LOG2E.value / temperature, ignore_index,
            WITH_ENTROPY=with_entropy, WIDE=wide(vocabulary, stride),
            LANES=min(lanes, bucket(-(-vocabulary // run))), RUN=run, num_warps=warps,
        )  # fmt: skip

    key = bucket(rows), bucket(vocabulary), str(logits_BTV.dtype), int(stride == 1), int(with_entropy)
    launch(TUNER.pick(FORWARD, key, logits_BTV.device, launch))
    return logp, entropy, lse


def backward(
    gradient_BTV: torch.Tensor,
    dlogp: torch.Tensor,
    dentropy: torch.Tensor,
    logits_BTV: torch.Tensor,
    targets_R: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    ignore_index: int,
) -> None:
    """Fills `gradient_BTV`, which may be the logits themselves."""
    from engine.kernels.logp_entropy.kernels import LOG2E, logp_entropy_bwd_kernel

    time, vocabulary = logits_BTV.shape[1:]
    dlogp, dentropy = dlogp.contiguous(), dentropy.contiguous()
    far = wide(vocabulary, max(abs(logits_BTV.stride(2)), abs(gradient_BTV.stride(2))))

    def launch(tile: Tile, out: torch.Tensor) -> None:
        block, warps = min(tile[0], bucket(vocabulary)), tile[1]
        logp_entropy_bwd_kernel[(targets_R.numel(), -(-vocabulary // block))](
            logits_BTV, targets_R, lse, entropy, dlogp, dentropy, out,
            time, vocabulary, *logits_BTV.stride(), *out.stride(), LOG2E.value / temperature, 1.0 / temperature,
            ignore_index, WITH_ENTROPY=with_entropy, WIDE=far, BLOCK_V=block, num_warps=warps,
        )  # fmt: skip

    scratch: list[torch.Tensor] = []

    def trial(tile: Tile) -> None:
        if not scratch:
            in_place = gradient_BTV.data_ptr() == logits_BTV.data_ptr()
            scratch.append(torch.empty_like(gradient_BTV) if in_place else gradient_BTV)
        launch(tile, scratch[0])

    lies = int(logits_BTV.stride(2) == 1), int(gradient_BTV.stride(2) == 1)
    key = bucket(targets_R.numel()), bucket(vocabulary), str(logits_BTV.dtype), *lies, int(with_entropy)
    launch(TUNER.pick(BACKWARD, key, logits_BTV.device, trial), gradient_BTV)
