"""From what length a prompt is better computed once for all its answers: a step of GRPO with and without, in turn.

    python benchmarks/prompt_sharing.py [--shape 8b] [--prompts 60 120 240] [--rounds 10] [--seconds 70]
                                        [--results FILE --commit HASH]
    python benchmarks/prompt_sharing.py --shape tiny --prompts 8 --rounds 3

LoRA, 16 answers of `--answer` tokens to two prompts, nothing computed again, cut cross-entropy. One arm shares its prompts
whatever their length, in sampling and in the loss, the other never does. Told are a step's milliseconds, those of the answers, and
the tokens that need not be computed times the weights of a layer: `engine.trainers.shared_prompts` shares from
`LEAST_SAVED` of these.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from _arms import ARMS, SHAPES, Builder
from _figures import Results, result_options
from _method_rows import rows_a_step
from _turns import CARD, Arm
from datasets import Dataset
from gpu_methods import compare, say

from engine.trainers import shared_prompts

SHARED, ALONE = "cut, none", "cut, none, each prompt by itself"
ARMS[ALONE] = ARMS[SHARED]


class LongPrompts(Builder):
    """Arms whose prompts have `options.prompt` tokens, of which one shares none."""

    def prepared_rows(self) -> Any:
        draw = torch.Generator().manual_seed(0)
        most = min(self.shape.vocab_size, self.tokenizer.vocab_size)
        rows = super().prepared_rows().to_list()
        for row in rows:
            row["prompt_ids"] = torch.randint(1, most, (self.options.prompt,), generator=draw).tolist()
        return Dataset.from_list(rows)

    def arm(self, name: str) -> Arm:
        arm = super().arm(name)
        arm.trainer.shares_prompts = name == SHARED
        return arm


class OfPrompts(Results):
    """Rows under the length of their prompts."""

    prompt = 0

    def under(self, work: str, shape: str, impl: str, ms: Sequence[float], peak_mib: float | None) -> tuple[str, str]:
        return "prompt_sharing", f"{work}, {shape}; prompts of {self.prompt}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--prompts", nargs="*", type=int, default=[60, 120, 240], metavar="TOKENS")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each arm at most")
    parser.add_argument("--seconds", type=float, default=70, help="of each length; no round is begun later than this")
    result_options(parser)
    given: Any = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    results = OfPrompts(given, torch.cuda.get_device_name() if CARD else "cpu", "torch", "triton")
    own = {"rows": 4, "tokens": 2048, "full": False, "ragged": False, "window": 1, "profile": None}
    size = SHAPES[given.shape]
    heads = size["num_attention_heads"] * (16 if given.shape == "tiny" else 128)
    narrow = (2 * 16) if given.shape == "tiny" else (8 * 128)
    weights = size["hidden_size"] * (2 * heads + 2 * narrow + 3 * size["intermediate_size"])
    with mock.patch.object(shared_prompts, "LEAST_SAVED", 0.0):
        for prompt in given.prompts:
            saved = (rows_a_step("grpo", own["rows"]) - 2) * (prompt - 1) * weights
            say(f"prompts of {prompt} tokens: {saved:.3g} saved")
            options = argparse.Namespace(**{**vars(given), **own, "prompt": prompt, "arms": [SHARED, ALONE]})
            until = time.perf_counter() + given.seconds
            results.prompt = prompt
            compare(options, "grpo", [SHARED, ALONE], until, results, LongPrompts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
