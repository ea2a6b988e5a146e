"""GRPO and GDPO on prompts with images: TRL's losses, an exact resume, and a reward that only who sees the picture gets."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from PIL import Image

from engine.data.vision import ImageBatch
from engine.run.rollouts import read_group
from engine.run.store import RunFolder
from tests.caches import own_cache
from tests.engine.seeing import FAMILIES, real_processor
from tests.engine.trainers.building import Built, apart
from tests.engine.trainers.conftest import lines
from tests.engine.trainers.test_against_trl import images_with_answers, steps
from tests.engine.trainers.test_grpo import curve, ids_of, same_after_a_resume

COLOURS = {"red": (220, 40, 40), "blue": (40, 80, 220)}
SEEN = """\
from PIL import Image

def seen(completion_ids, images, **_):
    red = [Image.open(found[0]).convert("RGB").getpixel((0, 0))[0] > 128 for found in images]
    return [float(bool(ids) and ids[0] % 2 == own) for ids, own in zip(completion_ids, red)]
"""
GRPO = {
    "method.kind": "grpo",
    "method.num_generations": 4,
    "method.max_completion_length": 4,
    "data.max_length": 512,
    "optim.per_device_train_batch_size": 8,
    "optim.gradient_accumulation_steps": 1,
}


@pytest.fixture
def cards(tmp_path):
    """Settings whose rows differ in their picture alone; the reward is 1 for an odd token under red and an even one under
    blue, so who does not look gets a half."""
    for name, colour in COLOURS.items():
        Image.new("RGB", (32, 32), colour).save(tmp_path / f"{name}.png")
    rows = [{"prompt": "<image>Which?", "images": [f"{name}.png"]} for name in COLOURS] * 8
    (tmp_path / "cards.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "seen.py").write_text(SEEN)
    reward = {"method.reward_funcs": [f"{tmp_path / 'seen.py'}:seen"]}
    return {**GRPO, **reward, "model.name": "builtin/tiny-vl", "data.train": [{"path": str(tmp_path / "cards.jsonl")}]}


def test_a_reward_for_what_the_picture_shows_rises_and_blanking_it_takes_the_answer_away(train, cards, tmp_path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    settings = {"method.max_completion_length": 1, "optim.per_device_train_batch_size": 32, "optim.max_steps": 30}
    run = train({**cards, **settings, "optim.learning_rate": 5e-3, "run.save_steps": 30})
    rewards = curve(run, "reward")
    assert sum(rewards[:3]) / 3 < 0.7
    assert sum(rewards[-5:]) / 5 > 0.8
    told = lines(run, "rollout")[0]
    assert read_group(run, told)["prompt"] == "<image>Which?"
    # The weights that were trained, asked by transformers alone.
    folder = run.checkpoints / "checkpoint-30"
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]
    text = processor.apply_chat_template(asked, add_generation_prompt=True)
    odd = {}
    for name, colour in {**COLOURS, "blank": (255, 255, 255)}.items():
        batch = processor(text=[text], images=[[Image.new("RGB", (32, 32), colour)]], return_tensors="pt")
        with torch.no_grad():
            odd[name] = model(**batch).logits[0, -1].softmax(-1)[1::2].sum().item()
    assert odd["red"] > 0.75
    assert odd["blue"] < 0.25
    assert abs(odd["blank"] - odd["red"]) > 0.05


def test_a_replayed_answer_is_seen_with_its_own_picture(train, cards, tmp_path):
    """Only answers to red ones are told apart. The weights hardly move, so a ratio leaves 1 by another picture alone."""
    (tmp_path / "red.py").write_text(SEEN.replace("== own)", "and own)").replace("def seen", "def red"))
    settings = {
        "method.reward_funcs": [f"{tmp_path / 'red.py'}:red"],
        "method.replay_buffer_size": 4,
        "method.replay_recompute_logps": False,
        "optim.max_steps": 4,
    }
    settings |= {"optim.learning_rate": 1e-9, "method.epsilon": 1e-4, "optim.per_device_train_batch_size": 16}
    run = train({**cards, **settings})
    assert max(curve(run, "replay/share")) >= 0.25
    assert curve(run, "clip_ratio/region_mean") == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", ["grpo", pytest.param("gdpo", marks=pytest.mark.slow)])
def test_resuming_in_the_middle_of_a_buffer_of_answers_to_pictures_is_exact(train, cards, tmp_path, kind):
    settings = {"method.kind": kind, "method.steps_per_generation": 4, "method.num_iterations": 2, "method.beta": 0.1}
    if kind == "gdpo":
        settings["method.reward_funcs"] = [*cards["method.reward_funcs"], "length:2"]
    same_after_a_resume(train, {**cards, **settings, "optim.gradient_accumulation_steps": 2}, tmp_path)


@pytest.mark.parametrize("family", ["idefics3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_losses_and_gradients_are_trls_own_for_the_same_answers(
    train, source, tmp_path, shared_data, monkeypatch, family
):
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText
    from trl import GRPOConfig, GRPOTrainer

    folder = FAMILIES[family](shared_data / "tokenizers/minimind", tmp_path / family)
    rows = [{"prompt": row["prompt"], "images": row["images"]} for row in images_with_answers(tmp_path, 8)]
    processor = real_processor(folder)
    # By itself TRL pads the prompts on the left and which of their tokens are an image's, as the tokenizer does, on the right.
    processor.tokenizer.padding_side = "left"
    drawn: list[itertools.count] = []

    def answered(self, prompt_ids, *_, **__):
        """As many tokens as in no other place, by nothing but the number of the sampling."""
        number = next(drawn[-1])
        return [
            [40 + (number * 7 + place * 11 + n) % 200 for n in range(2 + place % 3)] for place in range(len(prompt_ids))
        ], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", answered)
    drawn.append(itertools.count())
    theirs = GRPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=[lambda completion_ids, **_: [float(sum(ids) % 5) for ids in completion_ids]],
        args=GRPOConfig(
            output_dir=str(tmp_path / "plain"),
            per_device_train_batch_size=8,
            num_generations=4,
            num_iterations=2,
            beta=0.1,
            max_completion_length=4,
            max_steps=4,
            learning_rate=1e-3,
            logging_steps=1,
            seed=42,
            data_seed=42,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list(
            [{**row, "images": [Image.open(tmp_path / name).copy() for name in row["images"]]} for row in rows]
        ),
        processing_class=processor,
    )
    theirs.train()
    (tmp_path / "five.py").write_text(
        "def five(completion_ids, **_):\n    return [float(sum(ids) % 5) for ids in completion_ids]\n"
    )
    drawn.append(itertools.count())
    settings = {"model.name": str(folder), "data.train": [{"path": source(rows)}], "data.shuffle": False}
    settings |= {"method.num_iterations": 2, "method.beta": 0.1, "optim.max_steps": 4}
    run = train({**GRPO, **settings, "method.reward_funcs": [f"{tmp_path / 'five.py'}:five"]})
    ours, wanted = steps(lines(run, "metrics")), steps(theirs.state.log_history)
    assert len(ours) == 4
    assert max(gradient for *_, gradient in ours) > 0.01
    for found, other in zip(ours, wanted, strict=True):
        assert found == pytest.approx(other, rel=1e-4, abs=1e-7)


def sampled_from(settings, rows, folder):
    """A trainer that has sampled four answers to each of the first four rows."""
    built = Built(settings, rows, folder)
    trainer = built.trainer
    trainer.attach(RunFolder(folder), None, 1, {})
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    trainer._prepare_inputs([row for row in built.rows for _ in range(4)])
    trainer.rewards.close()
    return built


@pytest.mark.parametrize("taught", [{0, 3}, {2}, set()], ids=["some", "the one without images", "none"])
def test_answers_that_teach_are_computed_with_the_images_of_their_own_rows(tmp_path, monkeypatch, shared_data, taught):
    """Where none of these has images, the parts that see have zeros for gradients, as in the whole batch."""
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    folder = FAMILIES["qwen2_5_vl"](shared_data / "tokenizers/minimind", tmp_path / "model")
    rows = [{"prompt": row["prompt"], "images": row["images"]} for row in images_with_answers(tmp_path, 4)]
    rows[2] = {"prompt": rows[2]["prompt"], "images": []}
    settings = {**GRPO, "optim.gradient_accumulation_steps": 1, "optim.per_device_train_batch_size": 16}
    settings |= {"method.reward_funcs": ["length:4"]}
    built = sampled_from({**settings, "model.name": str(folder)}, rows, tmp_path)
    trainer = built.trainer
    (batch,) = trainer._buffered_inputs
    batch["teaches"] = torch.tensor([row in taught for row in batch["row"].tolist()])
    batch["advantages"] = torch.linspace(-1, 1, 16).double().masked_fill(~batch["teaches"], 0.0)
    found = []
    for reason in ("", "as TRL does"):
        trainer.computes_all, trainer._shown = reason, batch["shown"]
        built.model.zero_grad()
        loss = trainer.compute_loss(built.model, dict(batch))
        loss.backward()
        found.append(built._taken(loss))
    (ours, left), (theirs, whole) = found
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)
    assert apart(left, whole) < 1e-4
    assert any(each.any() for each in left.values()) == bool(taught)


@pytest.mark.parametrize(
    "family", [each if each == "qwen2_5_vl" else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_every_answer_is_sampled_and_judged_by_the_images_of_its_own_row(tmp_path, monkeypatch, shared_data, family):
    """Prompts with two, one and no image, padded and mixed: each answer is the likeliest by a pass of its row alone."""
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    folder = FAMILIES[family](shared_data / "tokenizers/minimind", tmp_path / family)
    rows = [{"prompt": row["prompt"], "images": row["images"]} for row in images_with_answers(tmp_path, 4)]
    rows[2] = {"prompt": rows[2]["prompt"], "images": []}
    settings = {**GRPO, "method.steps_per_generation": 4, "method.top_k": 1, "method.reward_funcs": ["length:2"]}
    settings |= {"model.name": str(folder), "optim.per_device_train_batch_size": 4}
    # the likeliest answers of a group are one, and would be left out
    built = sampled_from({**settings, "method.skip_zero_advantage": False}, rows, tmp_path)
    trainer = built.trainer
    seen, never = ImageBatch(trainer.processing_class), trainer.generation_config.suppress_tokens

    def logits_of(references, ids, width):
        images = seen([references], ids)
        exact = {name: value.double() if value.is_floating_point() else value for name, value in images.items()}
        with torch.no_grad():
            return built.model(input_ids=ids, **exact).logits[0, -width - 1 : -1]

    looked, differ = 0, []
    for batch in trainer._buffered_inputs:
        for place in range(4):
            prompt, answer = ids_of(batch, place)
            row = built.rows[batch["row"][place]]
            assert prompt == row["prompt_ids"]
            ids, token = torch.tensor([[*prompt, *answer]]), torch.tensor(answer)[:, None]
            logits = logits_of(row["images"], ids, len(answer))
            logps = logits.log_softmax(-1).gather(-1, token)[:, 0]
            assert torch.allclose(logps.float(), batch["old_per_token_logps"][place][: len(answer)].float(), atol=1e-5)
            logits[:, never] = -torch.inf
            assert logits.argmax(-1).tolist() == answer
            looked += len(row["images"])
            if row["images"]:
                blank = [tmp_path / f"blank-{number}.png" for number in range(len(row["images"]))]
                for name, reference in zip(blank, row["images"], strict=True):
                    Image.new("RGB", Image.open(reference).size, "white").save(name)
                other = logits_of(list(map(str, blank)), ids, len(answer)).log_softmax(-1).gather(-1, token)[:, 0]
                differ.append((other - logps).abs().max().item())
    assert looked == 4 * (1 + 2 + 0 + 2)
    assert min(differ) > 1e-4
