"""Whole runs with optimizers of ours: the loss falls, a resume goes on to the bit, what is saved and shown is the average."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import engine.generate
from engine.config.optimizers import KINDS
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, RATED, TEXTS, lines, resumed_from
from tests.engine.trainers.optimizers.test_building import PACKAGES
from tests.engine.trainers.test_grpo import GRPO, same_after_a_resume
from tests.engine.trainers.test_ppo import PPO


def settings(source, name, **more):
    return {
        "data.train": [{"path": source(CONVERSATIONS)}], "optim.optim": name, "optim.learning_rate": 1e-3,
        "optim.max_steps": 6, "run.save_steps": 3, **more,
    }  # fmt: skip


def losses(run, name="loss"):
    return {event["step"]: event[name] for event in lines(run, "metrics") if name in event}


def weights(run, step):
    path = run.checkpoints / f"checkpoint-{step}"
    return load_file(next(path.glob("*model.safetensors")))


def resumes_exactly(train, run, where):
    again = train(folder=resumed_from(run, 3, where))
    whole = losses(run)
    assert {step: loss for step, loss in losses(again).items() if step > 3} == {
        step: loss for step, loss in whole.items() if step > 3
    }
    ends, others = weights(run, 6), weights(again, 6)
    assert all(torch.equal(ends[name], others[name]) for name in ends)


def optimizer_in_receipt(run):
    return next(entry for entry in lines(run, "receipt")[0]["entries"] if entry["feature"] == "optimizer")


def test_schedule_free_shows_and_saves_its_average_and_trains_on(train, source, tmp_path, monkeypatch):
    pytest.importorskip("schedulefree")
    answering, answer = [], engine.generate.complete

    def noted(model, *args, **kwargs):
        answering.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
        return answer(model, *args, **kwargs)

    monkeypatch.setattr(engine.generate, "complete", noted)
    flat = {"optim.lr_scheduler_type": "constant_with_warmup", "optim.warmup_steps": 2}
    held_out = {"data.eval": [{"path": source(CONVERSATIONS[:8])}], "run.eval_steps": 2}
    shown = {"run.prompts": ["What comes after 3?"], "run.prompts_steps": 2, "run.max_new_tokens": 3}
    run = train(settings(source, "schedule_free_adamw", **flat, **held_out, **shown))
    found = losses(run)
    assert found[6] < found[1]
    saved = torch.load(run.checkpoints / "checkpoint-6" / "optimizer.pt", weights_only=True)
    assert not any(group["train_mode"] for group in saved["param_groups"])
    # The scheduler's warm-up is the only one: 1 of 2 steps, then the whole rate.
    assert saved["param_groups"][0]["scheduled_lr"] == pytest.approx(1e-3)
    assert saved["param_groups"][0]["warmup_steps"] == 0
    # Held-out loss at the end is that of the saved weights, so it is the average that is judged.
    assert losses(run, "eval_loss")[6] == pytest.approx(held_out_loss(run), rel=1e-5)
    ends = weights(run, 6)
    assert len(answering) == 4
    assert all(torch.equal(weight, ends[name]) for name, weight in answering[-1].items())
    resumes_exactly(train, run, tmp_path / "again")


@pytest.mark.slow
def test_held_out_rows_in_bfloat16_leave_the_average_as_it_is(train, source):
    pytest.importorskip("schedulefree")
    flat = {"optim.lr_scheduler_type": "constant", "data.eval": [{"path": source(CONVERSATIONS[:8])}]}
    runs = [
        train({**settings(source, "schedule_free_adamw", **flat), "run.eval_steps": 2, "optim.bf16_full_eval": rounded})
        for rounded in (False, True)
    ]
    exact, rounded = (weights(run, 6) for run in runs)
    assert all(torch.equal(exact[name], rounded[name]) for name in exact)
    assert losses(runs[1], "eval_loss")[6] == pytest.approx(losses(runs[0], "eval_loss")[6], rel=0.02)
    assert losses(runs[1], "eval_loss")[6] != losses(runs[0], "eval_loss")[6]


def held_out_loss(run):
    """The loss of the last checkpoint on the held-out rows, in plain torch."""
    from transformers import AutoModelForCausalLM

    from engine.config.files import load
    from engine.data.collate import collator_for
    from engine.data.prepare import prepare
    from engine.models.load import load_processing_class
    from engine.rules import read

    config = read(load(run.config).mapping).config
    tokenizer = load_processing_class(config)
    rows = prepare(config, tokenizer, "eval").dataset
    model = AutoModelForCausalLM.from_pretrained(run.checkpoints / "checkpoint-6", dtype=torch.float32).eval()
    total = []
    with torch.no_grad():
        for start in range(0, len(rows), 4):
            batch = collator_for(config, tokenizer)([rows[place] for place in range(start, start + 4)])
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            labels = batch["labels"][:, 1:]
            total.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    return torch.stack(total).mean().item()


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest(train, source, tmp_path, adapter):
    lora = {"adapter.kind": "lora", "adapter.r": 4} if adapter == "lora" else {}
    run = train(settings(source, "muon", **lora))
    found = losses(run)
    assert found[6] < found[1]
    said = optimizer_in_receipt(run)
    assert said["effective"] == "torch.optim.Muon"
    saved = torch.load(run.checkpoints / "checkpoint-6" / "optimizer.pt", weights_only=True)["state"].values()
    assert said["count"] == sum("momentum_buffer" in state for state in saved) > 0
    assert any("exp_avg_sq" in state for state in saved) == (adapter == "none")
    if adapter == "none":
        resumes_exactly(train, run, tmp_path / "again")


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_flash_adamw_keeps_8_bits_and_what_rounding_took_and_resumes_exactly(train, source, tmp_path, dtype):
    pytest.importorskip("pytorch_optimizer")
    run = train(settings(source, "flash_adamw", **{"model.dtype": dtype, "optim.weight_decay": 0.01}))
    assert losses(run)[6] < losses(run)[1]
    assert optimizer_in_receipt(run)["effective"] == "pytorch_optimizer.FlashAdamW"
    states = torch.load(run.checkpoints / "checkpoint-6" / "optimizer.pt", weights_only=True)["state"].values()
    kinds = {name.replace("::", " "): state[name].dtype for state in states for name in state}
    rest = {"error_bits": torch.int8} if dtype == "bfloat16" else {}
    moments = {"exp_avg quantized": torch.int8, "exp_avg_sq quantized": torch.uint8}
    assert kinds == {**moments, **dict.fromkeys(("exp_avg scales", "exp_avg_sq scales"), torch.float16), **rest}
    resumes_exactly(train, run, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adopt", "came", "dion", "galore_adamw", "q_galore_adamw_8bit"])
def test_every_other_one_trains_and_resumes_exactly(train, source, tmp_path, name):
    pytest.importorskip({"q_galore_adamw_8bit": "bitsandbytes", "dion": "torch"}.get(name, "pytorch_optimizer"))
    own = {"optim.optim_args": {"rank": 16, "update_proj_gap": 2, "scale": 1.0}} if "galore" in name else {}
    run = train(settings(source, name, **{"optim.weight_decay": 0.01, "run.save_steps": 3}, **own))
    found = losses(run)
    assert found[6] < found[1]
    assert optimizer_in_receipt(run)["count"] > 0
    resumes_exactly(train, run, tmp_path / "again")


def test_galore_without_a_layer_of_that_name_ends_the_run(train, source):
    pytest.importorskip("pytorch_optimizer")
    named = {"optim.optim_target_modules": ["no_such_layer"], "optim.optim_args": {"rank": 8}}
    run = train(settings(source, "galore_adamw", **named), code=1)
    assert "optimizer was requested and touched nothing" in lines(run, "failed")[0]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "schedule_free_adamw", "galore_adamw"])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_rollouts_train_with_them_and_resume_in_the_middle_of_a_buffer(train, source, tmp_path, name, kind):
    """PPO's value head is a group with a rate of its own, which none of these may project or make orthogonal."""
    if KINDS[name].package:
        pytest.importorskip(PACKAGES[KINDS[name].package])
    settings = {**{"grpo": GRPO, "ppo": PPO}[kind], "optim.optim": name, "method.steps_per_generation": 4}
    settings |= {"optim.lr_scheduler_type": "constant", "method.num_iterations": 2}
    if name == "galore_adamw":
        settings["optim.optim_args"] = {"rank": 8, "update_proj_gap": 2}
    same_after_a_resume(train, {**settings, "data.train": [{"path": source(CONVERSATIONS)}]}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "schedule_free_adamw"])
@pytest.mark.parametrize(
    ("kind", "rows"),
    [("dpo", PAIRS), ("kto", RATED), ("embedding", TEXTS), ("reward", PAIRS)],
    ids=lambda each: str(each)[:9],
)
def test_other_methods_train_with_them(train, source, name, kind, rows):
    if KINDS[name].package:
        pytest.importorskip(PACKAGES[KINDS[name].package])
    flat = {"optim.lr_scheduler_type": "constant", "data.train": [{"path": source(rows)}], "method.kind": kind}
    run = train({**settings(source, name), **flat})
    found = losses(run)
    assert found[6] < found[1]
    assert optimizer_in_receipt(run)["count"] > 0
