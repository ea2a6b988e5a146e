"""Method x feature x adapter: in each cell the feature does what it says and changes no number, or it is refused.

By default each method runs once plain and once with all that goes together, adapters in turn; every cell by itself is slow.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
import torch

from engine.config.facts import Facts
from engine.config.files import put
from engine.hardware import GiB, Machine
from engine.rules import read
from engine.trainers.table import METHODS
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, RATED, STEPS, TAUGHT, TEXTS, lines
from tests.engine.trainers.test_grpo import GRPO

CPU = Machine(cpu_count=2, memory_bytes=16 * GiB, disk_free_bytes=100 * GiB, name="cpu")
LINES = [{"text": f"What comes after {number}? {number + 1} comes after {number}."} for number in range(48)]
PROMPTS = {name: value for name, value in GRPO.items() if name != "method.kind"}
ROWS = {
    "sft": CONVERSATIONS, "pretrain": LINES, "kto": RATED, "prm": STEPS, "embedding": TEXTS, "distill": TAUGHT,
    "grpo": CONVERSATIONS, "gdpo": CONVERSATIONS, "ppo": CONVERSATIONS,
}  # fmt: skip
OWN = {
    "distill": {"optim.per_device_train_batch_size": 16},  # short rows: else no tensor is large enough to move
    "grpo": PROMPTS,
    "gdpo": PROMPTS,
    "ppo": {name: value for name, value in PROMPTS.items() if name != "method.num_generations"},
}
LORA = {"adapter.kind": "lora", "adapter.r": 4}
ADAPTERS = {
    "none": {},
    "lora": LORA,
    "dora": {**LORA, "adapter.use_dora": True},
    "unfrozen": {"adapter.unfrozen_parameters": [r"(.*\.)?layers\.[23]\.|score"]},
}
FEATURES = {
    "use_cut_ce": {"kernels.use_cut_ce": True},
    "selective": {"memory.gradient_checkpointing": "selective"},
    "medium": {"memory.gradient_checkpointing": "medium"},
    "full": {"memory.gradient_checkpointing": "full"},
    "disk": {"memory.activation_offloading": "disk"},
    "tiles": {"memory.tiled_mlp": True, "memory.tiled_mlp_tokens": 16},
    "int8": {"kernels.quantization_aware": True},
    "fused_lora": {"kernels.fused_lora": True},
    "compose": {"kernels.kernel_auto_compose": True, "kernels.torch_compile": False},
}
TOGETHER = (("use_cut_ce", "selective", "tiles"), ("use_cut_ce", "full", "disk", "tiles"), ("use_cut_ce", "medium"))
EVERY_TIME = ("sft", "dpo", "kto", "embedding", "grpo")
"""One of each kind of trainer; the others in `make test-all`."""
REFUSED = {
    "memory.activation_offloading": "cpu",
    "memory.layer_offloading": True,
    "optim.tf32": True,
    "kernels.fused_attn_kernel": True,
    "kernels.use_liger_kernel": True,
    "kernels.quantization_aware": "fp8",
}
HEADLESS = ("reward", "embedding", "prm")
SAMPLED = ("grpo", "gdpo", "ppo")
LINEARS = 4 * 7
NORMS = 4 * 4 + 1  # of the inputs, queries, keys and what follows attention; and the last
PLAIN: dict[tuple[str, str], list[float]] = {}


def settings(source, method, adapter):
    common = {"method.kind": method, "optim.max_steps": 2, "optim.gradient_accumulation_steps": 1, "run.save_steps": 2}
    rows = ROWS.get(method, PAIRS)
    return {**common, **OWN.get(method, {}), **ADAPTERS[adapter], "data.train": [{"path": source(rows)}]}


def losses(run):
    return [event["loss"] for event in lines(run, "metrics") if "loss" in event]


def receipt(run):
    return {entry["feature"]: entry for event in lines(run, "receipt") for entry in event["entries"]}


def check_rounded(run, plain, method):
    """Every linear layer of policy and reference copy is rounded, which the loss shows, a little."""
    said, reference = receipt(run), "reference: copy" in receipt(run)["loss"]["detail"]
    assert said["quantization-aware"]["count"] == LINEARS * (2 if reference else 1)
    if method not in SAMPLED:  # where answers differ, and all rewards may be nought
        assert losses(run) != plain
        assert losses(run) == pytest.approx(plain, rel=0.05, abs=0.02)


def check(run, plain, features, method):
    """The losses are those of the plain run, and the receipt tells each feature with what it acted on."""
    if "int8" in features:
        check_rounded(run, plain, method)
        return
    assert losses(run) == pytest.approx(plain, rel=2e-5, abs=2e-6)
    said = receipt(run)
    for name in features:
        if name == "use_cut_ce":
            entry = said["cut cross-entropy"]
            assert entry["count"] or (method in HEADLESS and "no vocabulary head" in entry["detail"])
        elif name == "disk":
            assert said["activation offloading"]["count"] > 16 << 10  # bytes of the first batch
        elif name == "tiles":
            assert (said["tiled MLP"]["effective"], said["tiled MLP"]["count"]) == ("16 tokens a tile", 4)
        elif name == "fused_lora":
            entry = said["fused LoRA"]
            assert (entry["effective"], entry["count"] % LINEARS, entry["count"] > 0) == ("closed form", 0, True)
            assert "left to PEFT" not in entry["detail"]
            assert ("gated blocks in tiles" in entry["detail"]) is ("tiles" in features)
        elif name == "compose":
            entry = said["kernels by timing"]
            detail = entry["detail"]
            kernels = ("cut cross-entropy", "fused LoRA")
            tried = [kernel in detail and f"{kernel} not tried" not in detail for kernel in kernels]
            assert tried[0] is (method not in HEADLESS), detail
            assert entry["count"] == (2 ** sum(tried) if any(tried) else None), detail
        else:
            assert (said["gradient checkpointing"]["effective"], said["gradient checkpointing"]["count"] >= 4) == (
                name,
                True,
            )


def together(*names):
    return {path: value for name in names for path, value in FEATURES[name].items()}


@pytest.mark.parametrize(
    ("number", "method"),
    [
        pytest.param(number, method, id=method, marks=() if method in EVERY_TIME else pytest.mark.slow)
        for number, method in enumerate(METHODS)
    ],
)
def test_features_together_change_no_number_in_any_method_and_int8_changes_few(train, source, number, method):
    adapter, names = list(ADAPTERS)[number % len(ADAPTERS)], TOGETHER[number % len(TOGETHER)]
    base = settings(source, method, adapter)
    plain = losses(train(base))
    names = (*names, "fused_lora") if adapter == "lora" else names
    check(train({**base, **together(*names)}), plain, names, method)
    check(train({**base, **together("int8")}), plain, ("int8",), method)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("method", METHODS)
def test_each_feature_with_each_adapter_in_each_method(train, source, method, adapter, feature):
    if feature == "fused_lora" and adapter != "lora":
        pytest.skip("a rule refuses it")
    base = settings(source, method, adapter)
    if (method, adapter) not in PLAIN:
        PLAIN[method, adapter] = losses(train(base))
    check(train({**base, **together(feature)}), PLAIN[method, adapter], (feature,), method)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "method"), enumerate(METHODS), ids=list(METHODS))
def test_held_out_rows_in_bfloat16_change_no_training_in_any_method(train, source, number, method):
    base = settings(source, method, list(ADAPTERS)[number % len(ADAPTERS)])
    base |= {"data.eval": [{"path": source(ROWS.get(method, PAIRS)[:16])}], "run.eval_steps": 1}
    plain, run = train(base), train({**base, "optim.bf16_full_eval": True})
    if method not in SAMPLED:  # other answers are sampled of held-out prompts, and the random numbers go on from there
        assert losses(run) == losses(plain)
        exact, held_out = (
            [e["eval_loss"] for e in lines(each, "metrics") if "eval_loss" in e] for each in (plain, run)
        )
        assert held_out != exact
        assert held_out == pytest.approx(exact, rel=0.05, abs=0.02)
    assert len([event for event in lines(run, "metrics") if "eval_loss" in event]) == 2
    copied = 2 if "reference: copy" in receipt(run)["loss"]["detail"] else 1
    assert receipt(run)["bf16 full eval"]["count"] >= copied * LINEARS


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_weights_of_four_bits_learn_in_each_method_and_looks_at_held_out_rows_change_nothing(train, source, method):
    pytest.importorskip("bitsandbytes")
    base = {**settings(source, method, "lora"), "model.quantization": "nf4"}
    looked = {"data.eval": [{"path": source(ROWS.get(method, PAIRS)[:16])}], "run.eval_steps": 1}
    plain, run = train(base), train({**base, **looked})
    said = receipt(run)["quantization"]
    assert (said["effective"], said["count"]) == ("Linear4bit", LINEARS)
    assert len([event for event in lines(run, "metrics") if "eval_loss" in event]) == 2
    if method not in SAMPLED:  # other answers are sampled of held-out prompts, and the random numbers go on from there
        assert losses(run) == losses(plain)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("method", METHODS)
def test_norms_in_float32_in_each_method(train, source, method, adapter):
    base = {**settings(source, method, adapter), "model.dtype": "bfloat16"}
    plain, run = (
        losses(train(base)),
        train({**base, "memory.fp32_norms": True, "memory.gradient_checkpointing": "full"}),
    )
    said, copied = receipt(run)["norms in float32"], "reference: copy" in receipt(run)["loss"]["detail"]
    assert (said["effective"], said["count"]) == ("float32", NORMS * (2 if copied else 1))
    trained = {"none": NORMS, "unfrozen": NORMS // 2}.get(adapter, 0)
    assert f"{trained} weights trained" in said["detail"]
    if method not in SAMPLED:  # where answers differ
        assert losses(run) == pytest.approx(plain, rel=0.1, abs=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("number", "method"), enumerate(METHODS), ids=list(METHODS))
def test_fp8_acts_in_each_method(train, source, number, method):
    pytest.importorskip("torchao")
    base = {**settings(source, method, list(ADAPTERS)[number % len(ADAPTERS)]), "model.dtype": "bfloat16"}
    plain, run = losses(train(base)), train({**base, "kernels.quantization_aware": "fp8"})
    said, reference = receipt(run), "reference: copy" in receipt(run)["loss"]["detail"]
    assert said["quantization-aware"]["count"] == LINEARS * (2 if reference else 1)
    assert said["quantization-aware"]["effective"] == "fp8, tensorwise (torchao)"
    assert all(math.isfinite(loss) for loss in losses(run))
    if method not in SAMPLED:
        assert losses(run) == pytest.approx(plain, rel=0.1, abs=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("number", "method"), enumerate(METHODS), ids=list(METHODS))
def test_what_a_card_alone_has_acts_in_each_method(train, source, number, method):
    """Activations on the host, the fused norm and rotation, TF32 and norms in float32 together, and of Liger's kernels, where
    they are installed, what those leave."""
    base = {**settings(source, method, list(ADAPTERS)[number % len(ADAPTERS)]), "model.dtype": "bfloat16"}
    more = {"memory.activation_offloading": "cpu", "kernels.fused_attn_kernel": True, "optim.tf32": True}
    more |= {"kernels.use_liger_kernel": True} if find_spec("liger_kernel") else {}
    plain, run = losses(train(base)), train({**base, **more, "memory.fp32_norms": True})
    said = receipt(run)
    times = 2 if "reference: copy" in said["loss"]["detail"] else 1
    assert said["activation offloading"]["count"] > 0  # bytes of the first batch
    assert (said["fused norm and rotary"]["count"], said["norms in float32"]["count"]) == (4 * times, NORMS * times)
    if "kernels.use_liger_kernel" in more:
        assert (said["Liger kernels"]["effective"], said["Liger kernels"]["count"]) == ("swiglu", 4 * times)
    assert "TF32 on" in said["precision"]["detail"]
    assert all(math.isfinite(loss) for loss in losses(run))
    if method not in SAMPLED:
        assert losses(run) == pytest.approx(plain, rel=0.1, abs=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("number", "method"), enumerate(METHODS), ids=list(METHODS))
def test_layers_stream_in_each_method(train, source, number, method):
    adapter = ("lora", "dora", "unfrozen")[number % 3]
    base = {**settings(source, method, adapter), "model.dtype": "bfloat16"}
    if method not in HEADLESS:
        base |= {"run.prompts": ["What comes after 3?"], "run.max_new_tokens": 4}
    plain, run = losses(train(base)), train({**base, "memory.layer_offloading": True})
    assert losses(run) == pytest.approx(plain, rel=1e-3, abs=1e-4)
    # Of the unfrozen model two layers train and two are frozen; a copied reference streams whole.
    copied = 4 if "reference: copy" in receipt(run)["loss"]["detail"] else 0
    assert receipt(run)["layer offloading"]["count"] == copied + (2 if adapter == "unfrozen" else 4)


@pytest.mark.parametrize("path", REFUSED)
@pytest.mark.parametrize("method", METHODS)
def test_what_a_cpu_or_this_version_cannot_do_is_refused_in_every_method(method, path):
    for adapter in ADAPTERS.values():
        mapping = {"model": {"name": "builtin/tiny"}, "data": {"train": [{"path": "rows.jsonl"}]}}
        for name, value in {"method.kind": method, **adapter, path: REFUSED[path]}.items():
            put(mapping, name, value)
        found = [finding for finding in read(mapping, Facts(machine=CPU)).findings if finding.path == path]
        assert [finding.severity for finding in found] == ["error"]
