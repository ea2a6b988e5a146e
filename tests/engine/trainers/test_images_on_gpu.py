"""On a card every feature that serves text serves images: the same losses and gradients within rounding, memory that falls, and
the vision tower is streamed, packed and rounded with the rest."""

from __future__ import annotations

import gc
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from trl import SFTTrainer

from tests.engine import seeing
from tests.engine.trainers.conftest import lines
from tests.engine.trainers.test_features_on_images import dequantized

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LAYERS = 4
"""Of the tower, and of the language model."""
WIDE = {"hidden_size": 1024, "intermediate_size": 4096}
OF_A_RUN = {
    "model.dtype": "bfloat16", "adapter.kind": "lora", "adapter.r": 8, "data.max_length": 768, "data.shuffle": False,
    "optim.max_steps": 3, "optim.gradient_accumulation_steps": 1, "optim.per_device_train_batch_size": 4,
    "run.save_steps": 100, "run.logging_steps": 1, "kernels.torch_compile": False, "kernels.use_cut_ce": False,
    "memory.gradient_checkpointing": False,
}  # fmt: skip
AGAIN = {"memory.gradient_checkpointing": "full"}
LEAN = {**AGAIN, "kernels.use_cut_ce": True}
FROZEN = {"model.train_vision": "none"}
SERVES = {
    "cut cross-entropy": ({}, {"kernels.use_cut_ce": True}),
    "full": ({}, AGAIN),
    "selective": ({}, {"memory.gradient_checkpointing": "selective"}),
    "medium": ({}, {"memory.gradient_checkpointing": "medium"}),
    "offloaded": (LEAN, {**LEAN, "memory.activation_offloading": "cpu"}),
    "on disk": (LEAN, {**LEAN, "memory.activation_offloading": "disk"}),
    "tiles": (LEAN, {**LEAN, "memory.tiled_mlp": True, "memory.tiled_mlp_tokens": 256}),
    "streamed": (LEAN, {**LEAN, "memory.layer_offloading": True}),
    "streamed, the tower frozen": ({**LEAN, **FROZEN}, {**LEAN, **FROZEN, "memory.layer_offloading": True}),
    "compiled": (AGAIN, {**AGAIN, "kernels.torch_compile": True}),
}
"""What is compared, and with what: where inputs alone are kept and no scores, the layers' own memory is the peak."""
LESS = {
    "compiled": 1.1,
    "offloaded": 0.99,
    "on disk": 0.99,
    "tiles": 0.99,
    "streamed": 0.85,
    "streamed, the tower frozen": 0.85,
}
"""How much of the other's peak it may take at most; others 0.95."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shared_data):
    """A Qwen2.5-VL of 150M numbers with its processor, half of them the tower's."""
    where = tmp_path_factory.mktemp("seeing")
    rope = {**seeing.MROPE, "mrope_section": [8, 12, 12]}
    text = {**WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    tower = {**WIDE, "depth": LAYERS, "num_heads": 16, "out_hidden_size": WIDE["hidden_size"]}
    tokenizer = shared_data / "tokenizers/minimind"
    return seeing.qwen2_5_vl(tokenizer, where / "model", text={**text, "rope_parameters": rope}, tower=tower)


@pytest.fixture
def rows(tmp_path, source):
    """Prompts with one or two pictures, and long answers."""
    from PIL import Image

    found = []
    for number in range(12):
        names = [f"{number}-{place}.png" for place in range(1 + number % 2)]
        for place, name in enumerate(names):
            picture = Image.effect_noise((160 + 16 * (number % 3), 96 + 32 * place), 40 + number).convert("RGB")
            picture.save(tmp_path / name)
        answer = " ".join(f"Shade {number * k % 97} of {k}." for k in range(60))
        found.append(
            {
                "prompt": [{"role": "user", "content": f"What is in number {number}?"}],
                "completion": [{"role": "assistant", "content": answer}],
                "images": names,
            }
        )
    return source(found)


@pytest.fixture
def taught(train, rows, folder, monkeypatch):
    """`taught(**settings)`: losses, the first step's gradients, the peak of the steps beyond what was there before, what the
    tower's linear layers are and how many of them are elsewhere between steps, and the receipt."""

    def one(**settings):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        found = SimpleNamespace(gradients={}, peak=0, tower=Counter(), away=0)
        step = SFTTrainer.training_step

        def training_step(self, *args, **kwargs):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            first = not found.gradients
            if first:
                tower = self.accelerator.unwrap_model(self.model).get_base_model().model.visual
                linear = [each for each in tower.blocks.modules() if hasattr(each, "in_features")]
                linear = [each for each in linear if not hasattr(each, "base_layer")]
                linear = [each for each in linear if not each.weight.requires_grad]
                found.tower = Counter(type(each).__name__ for each in linear)
                found.away = sum(each.weight.untyped_storage().nbytes() == 0 for each in linear)
            loss = step(self, *args, **kwargs)
            torch.cuda.synchronize()
            found.peak = max(found.peak, torch.cuda.max_memory_allocated() - before)
            if first:
                found.gradients = {
                    name: weight.grad.float().cpu()
                    for name, weight in self.model.named_parameters()
                    if weight.grad is not None
                }
            return loss

        with monkeypatch.context() as within:
            within.setattr(SFTTrainer, "training_step", training_step)
            run = train({"model.name": str(folder), "data.train": [{"path": rows}], **OF_A_RUN, **settings})
        torch._dynamo.reset()
        found.losses = [event["loss"] for event in lines(run, "metrics") if "loss" in event]
        found.receipt = {entry["feature"]: entry for event in lines(run, "receipt") for entry in event["entries"]}
        assert len(found.losses) == 3
        return found

    return one


def apart(ours, theirs):
    """By how much gradients differ, of all weights together."""
    names = theirs.keys()
    assert {name.replace("._orig_mod", "") for name in ours} == set(names)
    ours = {name.replace("._orig_mod", ""): each for name, each in ours.items()}
    whole = sum(float(theirs[name].square().sum()) for name in names)
    return (sum(float((ours[name] - theirs[name]).square().sum()) for name in names) / whole) ** 0.5


def of_the_tower(gradients):
    return sum(float(each.norm()) for name, each in gradients.items() if "visual" in name)


TOGETHER: dict[str, list[str]] = {}
for _name, (_with_what, _) in SERVES.items():
    TOGETHER.setdefault(str(_with_what), []).append(_name)


@pytest.mark.parametrize("names", TOGETHER.values(), ids=lambda names: names[0])
def test_features_serve_images_on_a_card_and_memory_falls(taught, names):
    """Those that are compared with the same run."""
    wrong = []
    beside = taught(**SERVES[names[0]][0])
    for name in names:
        settings = SERVES[name][1]
        found = taught(**settings)
        gradients, share = apart(found.gradients, beside.gradients), found.peak / beside.peak
        losses = max(abs(a / b - 1) for a, b in zip(found.losses, beside.losses, strict=True))
        told = (
            f"{name}: losses within {losses:.1e}, gradients within {gradients:.1e}, peak {found.peak / 2**20:.0f} MiB, "
            f"{share:.2f} of {beside.peak / 2**20:.0f}; tower {dict(found.tower)}, {found.away} away"
        )
        print(told, flush=True)
        if losses > 5e-3 or gradients > 3e-2 or share > LESS.get(name, 0.95):
            wrong.append(told)
        assert bool(of_the_tower(found.gradients)) is not (FROZEN.items() <= settings.items())
        if name.startswith("streamed"):
            assert found.receipt["layer offloading"]["count"] == 2 * LAYERS
            assert found.away >= sum(found.tower.values()) * (LAYERS - 2) // LAYERS
        else:
            assert not found.away
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("bits", ["nf4", "fp8"])
def test_packed_bases_serve_images_on_a_card_and_memory_falls(taught, folder, tmp_path, bits, streamed):
    more = {"memory.layer_offloading": True} if streamed else {}
    plain = taught(**LEAN)
    found = taught(**LEAN, **more, **{"model.quantization": bits})
    twin = plain
    if bits == "nf4":
        twin = taught(**LEAN, **{"model.name": str(dequantized(folder, tmp_path / "twin", "bfloat16"))})
    gradients, share = apart(found.gradients, twin.gradients), found.peak / plain.peak
    losses = max(abs(a / b - 1) for a, b in zip(found.losses, twin.losses, strict=True))
    rounded = apart(found.gradients, plain.gradients)
    print(
        f"{bits}, streamed {streamed}: losses within {losses:.1e}, gradients within {gradients:.1e} ({rounded:.1e} of those in 16 "
        f"bits), peak {found.peak / 2**20:.0f} MiB, {share:.2f} of {plain.peak / 2**20:.0f}; tower {dict(found.tower)}, "
        f"{found.away} away; {found.receipt['quantization']['detail'] if 'quantization' in found.receipt else ''}",
        flush=True,
    )
    assert of_the_tower(found.gradients)
    # qkv, output, gate, up and down of each layer of the tower; FP8 leaves the smallest alone.
    packed = found.tower["Linear4bit" if bits == "nf4" else "Fp8BaseLinear"]
    assert packed == LAYERS * (5 if bits == "nf4" else 4)
    assert found.away if streamed else not found.away
    assert losses <= 1e-2
    assert gradients <= (5e-2 if bits == "nf4" else 0.25)
    assert share < (0.85 if bits == "nf4" else 0.92)
    shutil.rmtree(tmp_path / "twin", ignore_errors=True)
