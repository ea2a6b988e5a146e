"""A run that is taken up again equals one that was never interrupted: losses, gradients, tokens and weights, to the bit."""

from __future__ import annotations

import pytest
import torch
from peft.tuners import tuners_utils
from safetensors.torch import load_file

from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, RATED, STEPS, TAUGHT, TEXTS, lines, resumed_from

LORA = {"adapter.kind": "lora", "adapter.r": 4}
DROPOUT = {**LORA, "adapter.lora_dropout": 0.1}
TEXT = [{"text": f"{number} is followed by {number + 1}, and that by {number + 2}."} for number in range(60)]


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        pytest.param({}, CONVERSATIONS, id="sft, full weights, over an epoch's end"),
        pytest.param(DROPOUT, CONVERSATIONS, id="sft, LoRA with dropout", marks=pytest.mark.slow),
        pytest.param(
            {**DROPOUT, "data.dataloader_num_workers": 2},
            CONVERSATIONS,
            id="dropout beside processes that make batches",
        ),
        pytest.param(
            {"model.dtype": "bfloat16", **LORA}, CONVERSATIONS, id="sft, LoRA in bfloat16", marks=pytest.mark.slow
        ),
        pytest.param(
            {"model.dtype": "bfloat16", "optim.optim": "adafactor"},
            CONVERSATIONS,
            id="sft in bfloat16, factors of Adafactor in float32",
        ),
        pytest.param(
            {"method.kind": "pretrain", "data.packing": True, "data.packing_cross_doc_attn_mask": True},
            TEXT,
            id="pretraining on packs kept apart",
        ),
        pytest.param({"method.kind": "dpo"}, PAIRS, id="dpo with a copy as reference"),
        pytest.param({"method.kind": "kto", **LORA}, RATED, id="kto, shuffled, with the adapter switched off"),
        pytest.param({"method.kind": "ipo", **LORA}, PAIRS, id="ipo", marks=pytest.mark.slow),
        pytest.param({"method.kind": "simpo", **DROPOUT}, PAIRS, id="simpo with dropout", marks=pytest.mark.slow),
        pytest.param(
            {"method.kind": "reward", **LORA},
            PAIRS,
            id="reward model, its new head beside the adapter",
            marks=pytest.mark.slow,
        ),
        pytest.param({"method.kind": "distill"}, TAUGHT, id="distillation", marks=pytest.mark.slow),
        pytest.param({"method.kind": "embedding", **DROPOUT}, TEXTS, id="embedding", marks=pytest.mark.slow),
        pytest.param({"method.kind": "prm", **LORA}, STEPS, id="process reward model", marks=pytest.mark.slow),
        pytest.param({"method.kind": "orpo"}, PAIRS, id="orpo", marks=pytest.mark.slow),
        pytest.param(
            {"kernels.quantization_aware": True},
            CONVERSATIONS,
            id="sft with int8 rounding in place",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"method.kind": "dpo", **LORA},
            PAIRS,
            id="dpo with the adapter switched off as reference",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"model.dtype": "bfloat16", "memory.fp32_norms": True},
            CONVERSATIONS,
            id="sft, norms in float32",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_resuming_equals_never_stopping(train, source, tmp_path, settings, rows):
    # An epoch has six steps: what comes after step 4 is in two of them.
    whole = train({**settings, "optim.max_steps": 7, "data.train": [{"path": source(rows)}]})
    again = train(folder=resumed_from(whole, 4, tmp_path / "again"))

    def curve(run, segment):
        timeless = ("loss", "grad_norm", "learning_rate", "tokens", "trained_tokens", "epoch", "num_tokens")
        return {
            event["step"]: [event.get(name) for name in timeless]
            for event in lines(run, "metrics", segment)
            if event["step"] > 4
        }

    assert lines(again, "started", 1)[0]["resumed_from_step"] == 4
    assert sorted(curve(whole, 0)) == [5, 6, 7]
    assert curve(again, 1) == curve(whole, 0)
    name = "adapter_model.safetensors" if settings.get("adapter.kind") == "lora" else "model.safetensors"
    first, second = (load_file(run.checkpoints / "checkpoint-7" / name) for run in (whole, again))
    assert first.keys() == second.keys()
    assert all(first[key].dtype == second[key].dtype and first[key].equal(second[key]) for key in first)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("reward", PAIRS),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("kto", RATED), ("dpo", PAIRS), ("simpo", PAIRS), ("distill", TAUGHT))
        ),
    ],
)
def test_means_over_steps_are_the_same_after_a_resume_between_two_logged_steps(train, source, tmp_path, kind, rows):
    settings = {"method.kind": kind, "run.logging_steps": 3, "data.train": [{"path": source(rows)}]}
    whole = train({**settings, "optim.max_steps": 7})
    again = train(folder=resumed_from(whole, 4, tmp_path / "again"))

    def curves(run, segment):
        clock = {"seq", "t", "segment", "data_seconds", "step_seconds", "tokens_per_second", "memory_allocated"}
        return [
            {name: value for name, value in event.items() if name not in clock}
            for event in lines(run, "metrics", segment)
            if event["step"] > 4
        ]

    assert [event["step"] for event in lines(whole, "metrics")] == [3, 4, 6, 7]
    assert curves(again, 1) == curves(whole, 0)


def test_an_adapter_in_16_bits_goes_on_whatever_peft_does_to_its_weights_as_it_loads_them(
    train, source, tmp_path, monkeypatch
):
    """PEFT 0.21.2 puts parameters of float32 in the place of those whose gradients are clipped; 0.21.0 raised these."""

    def replaces(model, adapter_name, autocast_adapter_dtype=True):
        for module in list(model.modules()) if autocast_adapter_dtype else ():
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight.requires_grad and weight.dtype == torch.bfloat16:
                    setattr(module, name, torch.nn.Parameter(weight.data.float()))

    monkeypatch.setattr(tuners_utils, "cast_adapter_dtype", replaces)
    given = {"model.dtype": "bfloat16", **LORA, "optim.max_steps": 4, "run.save_steps": 2, "optim.learning_rate": 1e-2}
    whole = train({**given, "optim.gradient_accumulation_steps": 1, "data.train": [{"path": source(CONVERSATIONS)}]})
    copied = train(folder=resumed_from(whole, 2, tmp_path / "copy"))
    half, end, again = (
        load_file(run.checkpoints / f"checkpoint-{step}/adapter_model.safetensors")
        for run, step in ((whole, 2), (whole, 4), (copied, 4))
    )
    assert not any(torch.equal(weight, half[name]) for name, weight in end.items())
    assert all(torch.equal(weight, end[name]) and weight.dtype == torch.bfloat16 for name, weight in again.items())


def test_samples_leave_no_trace_in_the_training(train, source):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 4}
    plain = train(settings)
    sampled = train(
        {**settings, "run.prompts": ["What comes after 7?"], "run.prompts_steps": 2, "run.max_new_tokens": 8}
    )
    assert [event["step"] for event in lines(sampled, "sample")] == [0, 2, 4]
    assert [event["loss"] for event in lines(plain, "metrics")] == [
        event["loss"] for event in lines(sampled, "metrics")
    ]


def test_a_broken_newest_checkpoint_is_skipped_and_named(train, source, tmp_path):
    whole = train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 3, "run.save_steps": 1})
    again = resumed_from(whole, 2, tmp_path / "again")
    (whole.checkpoints / "checkpoint-1").rename(again.checkpoints / "checkpoint-1")
    weights = again.checkpoints / "checkpoint-2/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    train(folder=again)
    assert lines(again, "started", 1)[0]["resumed_from_step"] == 1
    assert any("checkpoint-2 is skipped" in event["message"] for event in lines(again, "finding", 1))


def test_resuming_on_images_equals_never_stopping(train, source, tmp_path, shared_data):
    from tests.engine.seeing import idefics3
    from tests.engine.trainers.test_against_trl import images_with_answers

    folder = idefics3(shared_data / "tokenizers/minimind", tmp_path / "idefics3")
    settings = {"model.name": str(folder), "data.max_length": 512, "optim.max_steps": 3, "run.save_steps": 2}
    whole = train({**settings, "data.train": [{"path": source(images_with_answers(tmp_path))}]})
    again = train(folder=resumed_from(whole, 2, tmp_path / "again"))
    assert lines(again, "started", 1)[0]["resumed_from_step"] == 2
    losses = [[event["loss"] for event in lines(run, "metrics", segment)] for run, segment in ((whole, 0), (again, 1))]
    assert losses[1] == losses[0][2:]
    first, second = (load_file(run.checkpoints / "checkpoint-3" / "model.safetensors") for run in (whole, again))
    assert all(first[key].equal(second[key]) for key in first)
