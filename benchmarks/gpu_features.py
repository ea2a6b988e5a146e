"""Features on and off, in one process: SFT with LoRA of a Qwen3-0.6B shape, random weights, bf16, 4 rows of 2,048 tokens.

    python benchmarks/gpu_features.py [--shape 06b|qwen2_15b] [--arms ...] [--seconds 110] [--commit HASH] [--results FILE]

The second shape is Qwen2-1.5B's, which Qwen2-VL-2B's text has too: queries and keys are rotated there and not normed.

Each arm is a model of its own with TRL's fused head, as the trainer builds it, with the features of that arm applied by
the same functions that a run applies them with. All arms start from the same weights and see the same batches. A round
gives each arm in turn one step of forward, backward, clip and AdamW; the order turns from round to round. A row is
the median and the tenth and ninetieth percentile of an arm's steps in ms, the peak of one of its steps above what all
arms hold, and the median ratio to the plain arm of the same round with its 95% interval. Losses of the first step are
compared with the plain arm's. Everything printed is flushed at once, so that what is known stands when time ends.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from _figures import Results, ratio, result_options
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trl.models.activation_offloading import get_act_offloading_ctx_manager
from trl.trainer.utils import add_fused_lm_head

from engine.features.built import Built
from engine.features.compile.apply import compile_layers
from engine.features.cut_cross_entropy import apply as cut_cross_entropy
from engine.features.fused_norm_rope import apply as fused_norm_rope
from engine.features.gradient_checkpointing.tiers import use_tier

ROWS, TOKENS, VOCABULARY = 4, 2048, 151_936
SHAPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "06b": (
        Qwen3ForCausalLM, Qwen3Config,
        {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY, "tie_word_embeddings": True,
        },
    ),
    "qwen2_15b": (
        Qwen2ForCausalLM, Qwen2Config,
        {
            "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
            "num_key_value_heads": 2, "vocab_size": VOCABULARY, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "use_cut_ce": {"cut": True},
    "fused_attn_kernel": {"fused": True},
    "torch_compile": {"compile": True},
    "fused and compiled": {"fused": True, "compile": True},
    "all three": {"cut": True, "fused": True, "compile": True},
    "selective": {"tier": "selective"},
    "medium": {"tier": "medium"},
    "full": {"tier": "full"},
    "activation_offloading cpu": {"offload": True},
    "full + all three": {"tier": "full", "cut": True, "fused": True, "compile": True},
}
# Two orders of rounding in bf16 over 28 layers; the loss is a mean over 8,188 tokens.
LOSS_TOLERANCE = 2e-3
LEAST_ROUNDS = 5


class Arm:
    """One model with its features, its optimizer, and what its steps took."""

    def __init__(
        self, name: str, shape: str, features: dict[str, Any], weights: dict[str, torch.Tensor] | None
    ) -> None:
        self.name, self.features = name, features
        torch.manual_seed(0)
        kind, told, sizes = SHAPES[shape]
        with torch.device("cuda"):
            base = kind(told(**sizes)).to(torch.bfloat16)
        if weights is not None:
            base.load_state_dict(weights, assign=True)  # the frozen base is shared by all arms
            base.tie_weights()
        self.weights = base.state_dict()
        adapter = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
        torch.manual_seed(1)
        self.model: Any = get_peft_model(base, adapter, autocast_adapter_dtype=False)
        add_fused_lm_head(base)
        self.model.train()
        self.apply(base, features)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True)
        self.times: list[float] = []
        self.peak, self.first_loss, self.failed = 0, float("nan"), ""

    def apply(self, base: Any, features: dict[str, Any]) -> None:
        built = Built(self.model)
        on = SimpleNamespace(
            method=None, kernels=SimpleNamespace(use_cut_ce=True, cut_ce_workspace=None, fused_attn_kernel=True)
        )
        tier = features.get("tier")
        if tier in ("selective", "medium"):
            use_tier(base, tier)
        if tier:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if features.get("cut"):
            cut_cross_entropy.apply(on, built)
        if features.get("fused"):
            fused_norm_rope.apply(on, built)
        if features.get("compile"):
            compile_layers(built.decoder_layers(), {})
        self.context: Callable[[], Any] | None = None
        if features.get("offload"):
            moving = get_act_offloading_ctx_manager(self.model, warn_if_no_head=False)
            self.context = lambda: moving

    def step(self, ids: torch.Tensor) -> float:
        """One optimizer step; returns its loss, which waits for the device."""
        if self.context is None:
            loss = self.loss(ids)
        else:
            with self.context():
                loss = self.loss(ids)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False)
        loss: torch.Tensor = -out.log_probs.sum() / (ids.numel() - ids.shape[0])
        loss.backward()
        return loss.detach()

    def timed(self, ids: torch.Tensor) -> float:
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        self.step(ids)
        torch.cuda.synchronize()
        took = (time.perf_counter() - begun) * 1e3
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - held)
        return took


def batch(number: int) -> torch.Tensor:
    """Rows in which some tokens are far more frequent than others, as in text."""
    generator = torch.Generator("cuda").manual_seed(number)
    uniform = torch.rand(ROWS, TOKENS, device="cuda", generator=generator)
    return (VOCABULARY**uniform).long().clamp(max=VOCABULARY - 1)


def warm(arms: list[Arm], until: float) -> list[Arm]:
    """Three steps of each arm (compilation among them); says what the first loss was. Arms that fail are named."""
    ready: list[Arm] = []
    for arm in arms:
        if time.monotonic() > until:
            say(f"{arm.name}: not reached")
            continue
        begun = time.monotonic()
        try:
            arm.first_loss = arm.step(batch(0))
            for number in (1, 2):
                arm.step(batch(number))
        except Exception as problem:  # noqa: BLE001 - one arm's failure is a finding, the others go on
            say(f"{arm.name}: FAILED {type(problem).__name__}: {str(problem).splitlines()[0][:300]}")
            continue
        torch.cuda.synchronize()
        ready.append(arm)
        error = arm.first_loss - ready[0].first_loss
        verdict = "equal" if abs(error) <= LOSS_TOLERANCE * abs(ready[0].first_loss) else "DIFFERS"
        say(f"{arm.name}: first loss {arm.first_loss:.5f} ({verdict}, {error:+.5f}), {time.monotonic() - begun:.1f} s")
    return ready


def report(arms: list[Arm], work: str, results: Results | None = None) -> None:
    """Tells what is known so far; into `results` goes what is known at the end."""
    for arm in arms:
        middle, low, high = ratio(list(zip(arm.times, arms[0].times, strict=True)))
        say(
            f"{arm.name:28} {statistics.median(arm.times):8.2f} ms  ratio {middle:.3f} [{low:.3f}, {high:.3f}]  "
            f"peak {arm.peak / 2**20:8.0f} MiB  n={len(arm.times)}"
        )
        if results is not None:
            shape = f"{ROWS}x{TOKENS}"
            results.add(work, shape, arm.name, ms=arm.times, peak_mib=arm.peak / 2**20)
    say("")


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="06b")
    parser.add_argument("--seconds", type=float, default=110, help="after so long no round is begun")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), help="these alone; plain is always among them")
    result_options(parser)
    options = parser.parse_args()
    begun, work = time.monotonic(), f"sft_{options.shape}_lora_features"
    names = [name for name in ARMS if not options.arms or name in ("plain", *options.arms)]
    arms: list[Arm] = []
    for name in names:
        arms.append(Arm(name, options.shape, ARMS[name], arms[0].weights if arms else None))
    say(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {len(arms)} arms, {time.monotonic() - begun:.1f} s"
    )
    ready = warm(arms, begun + 0.65 * options.seconds)
    if not ready or ready[0] is not arms[0]:
        raise SystemExit("the plain arm did not run: there is nothing to compare with")
    rounds = 0
    while time.monotonic() - begun < options.seconds or rounds < LEAST_ROUNDS:
        ids = batch(10 + rounds)
        turn = rounds % len(ready)
        for arm in ready[turn:] + ready[:turn]:
            arm.times.append(arm.timed(ids))
        rounds += 1
        if rounds == 25:
            break
        if rounds in (LEAST_ROUNDS, 12):
            report(ready, work)
    report(ready, work, Results(options, torch.cuda.get_device_name(), "torch"))


if __name__ == "__main__":
    main()
