"""Layers that stream from the host beside layers that stay, in one process: SFT steps of an 8B LoRA shape on one CUDA device.

    python benchmarks/layer_offload.py [--cases bf16-16384 nf4-4096 ...] [--seconds 200] [--results FILE --commit HASH]

Qwen3-8B's shape with random weights, LoRA r=16 on all linear layers in bf16, TRL's fused head, full checkpointing, one
micro-batch of forward and backward per step and fused AdamW. Both arms learn from the same weights and batches; a step of
one, then of the other, in turn. The ratio is the median of the pairs', its 95 % interval from drawing the pairs again.
Peaks are what an arm alone would take, and the floor is the resident arm. Nothing is reported of a case unless the arms'
first losses are equal to the bit; later ones part by what fused
attention's backward pass rounds, which adds in any order.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from _figures import Results, ratio, result_options
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from engine.features.built import Built
from engine.features.compile.apply import apply as compile_layers_of
from engine.features.layer_offloading.apply import LayerOffloading

VOCABULARY, ROW = 151_936, 2048
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
    "dtype": torch.bfloat16,
}  # fmt: skip
CASES = ["bf16-16384", "bf16-8192", "bf16-16384-compiled", "bf16-8192-compiled", "nf4-4096", "nf4-8192"]
LEAST_PAIRS, WARM = 4, 2


def in_four_bits(model: Any) -> None:
    """Every linear layer inside the decoder layers, packed as `model.quantization: nf4` packs it."""
    import bitsandbytes as bnb

    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in list(block.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    packed = bnb.nn.Linear4bit(
                        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, device="meta"
                    )
                    packed.weight = bnb.nn.Params4bit(
                        linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
                    )
                    setattr(block, name, packed.to("cuda"))


class Arm:
    """One model, its layers resident or streaming, with its optimizer."""

    def __init__(self, streamed: bool, bits: str, compiled: bool) -> None:
        self.name = "streamed" if streamed else "resident"
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            base = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
        torch.set_default_dtype(torch.float32)
        if bits == "nf4":
            in_four_bits(base)
        torch.manual_seed(1)
        adapter = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
        self.model: Any = get_peft_model(base, adapter, autocast_adapter_dtype=False).train()
        for weight in self.model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.to("cuda", torch.bfloat16)
        self.offloading = LayerOffloading() if streamed else None
        begun = time.monotonic()
        if self.offloading is not None:
            self.offloading.on_model(self.model)
            print(f"moved to the host in {time.monotonic() - begun:.1f} s", flush=True)
        add_fused_lm_head(base)
        self.model.enable_input_require_grads()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trainer = SimpleNamespace(model=self.model, training_step=lambda: None)
        if compiled:
            kernels = SimpleNamespace(torch_compile=True, torch_compile_options={})
            compile_layers_of(
                SimpleNamespace(
                    kernels=kernels,
                    memory=SimpleNamespace(gradient_checkpointing="full"),
                    data=SimpleNamespace(packing=True),
                ),
                Built(self.model, trainer),
            )
        if self.offloading is not None:
            print(self.offloading.on_trainer(Built(self.model, trainer)).detail, flush=True)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True)
        torch.cuda.synchronize()
        self.held = torch.cuda.memory_allocated() - before
        self.times: list[float] = []
        self.losses: list[float] = []
        self.peak = 0

    def step(self, ids: torch.Tensor) -> None:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        out = self.model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False)
        loss = -out.log_probs.sum() / ids.numel()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        self.times.append((time.perf_counter() - begun) * 1e3)
        self.losses.append(float(loss.detach()))
        self.peak = torch.cuda.max_memory_allocated() - before + self.held

    def close(self) -> None:
        if self.offloading is not None:
            self.offloading.undo()


def contest(case: str, results: Results, until: Callable[[], bool]) -> None:
    bits, tokens, *rest = case.split("-")
    rows = int(tokens) // ROW
    arms = [Arm(streamed, bits, bool(rest)) for streamed in (False, True)]
    generator = torch.Generator("cuda").manual_seed(0)
    for number in range(WARM + 20):
        ids = torch.randint(VOCABULARY, (rows, ROW), device="cuda", generator=generator)
        for arm in arms if number % 2 else reversed(arms):
            arm.step(ids)
        if number == WARM - 1:
            for arm in arms:
                print(f"{case} {arm.name}: first steps {', '.join(f'{each:.0f}' for each in arm.times)} ms", flush=True)
                arm.times.clear()
        if number >= WARM + LEAST_PAIRS - 1 and until():
            break
    resident, streamed = arms
    middle, low, high = ratio(list(zip(streamed.times, resident.times, strict=True)))
    apart = max(abs(ours / theirs - 1) for ours, theirs in zip(streamed.losses, resident.losses, strict=True))
    same = resident.losses[0] == streamed.losses[0]
    words = "equal to the bit" if same else "DIFFERENT, not reported"
    print(f"{case}: first loss {words}, all within {apart:.1e}", flush=True)
    if not same:
        for arm in arms:
            arm.close()
        return
    print(f"{case}: streamed/resident {middle:.3f} [{low:.3f}, {high:.3f}] n={len(resident.times)}", flush=True)
    for arm in arms:
        peak = arm.peak / 2**20
        print(f"{case:22} {arm.name:10} {statistics.median(arm.times):8.1f} ms {peak:8.0f} MiB", flush=True)
        results.add(
            "layer_offload_8b", case, arm.name, ms=arm.times, peak_mib=peak, floor_ms=statistics.median(resident.times)
        )
        arm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=CASES, metavar="FORMAT-TOKENS[-compiled]")
    parser.add_argument("--seconds", type=float, default=200, help="shared out evenly among the cases")
    result_options(parser)
    options = parser.parse_args()
    results = Results(options, torch.cuda.get_device_name(), "torch", "triton")
    for case in options.cases:
        end = time.monotonic() + options.seconds / len(options.cases)
        contest(case, results, lambda end=end: time.monotonic() > end)  # type: ignore[misc]
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
