"""SimPO and ORPO on pairs with images: the losses of plain transformers, each answer in a pass of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.engine.seeing import FAMILIES, real_processor, template
from tests.engine.trainers.conftest import lines
from tests.engine.trainers.test_against_trl import images_with_answers

RATE = 0.05
SHOWN = {
    "idefics3": "<image>",
    "gemma3": "<start_of_image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
SETTINGS = {"simpo": {"method.beta": 2.0, "method.simpo_gamma": 1.0}, "orpo": {"method.beta": 0.5}}


def judged(method, chosen, rejected):
    """The papers' losses of one pair, from mean log-probabilities (arXiv:2405.14734 eq. 6, 2403.07691 eq. 6 and 7)."""
    if method == "simpo":
        return -F.logsigmoid(2.0 * (chosen - rejected) - 1.0)
    odds = [mean - torch.log1p(-mean.exp()) for mean in (chosen, rejected)]
    return -chosen - 0.5 * F.logsigmoid(odds[0] - odds[1])


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("orpo", "qwen2_5_vl"),
        *(
            pytest.param(method, family, marks=pytest.mark.slow)
            for method, family in (
                ("simpo", "idefics3"),
                ("orpo", "idefics3"),
                ("simpo", "qwen2_5_vl"),
                ("simpo", "gemma3"),
                ("orpo", "gemma3"),
            )
        ),
    ],
)
def test_losses_of_pairs_on_images_are_those_of_single_passes(train, source, tmp_path, shared_data, method, family):
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    folder = FAMILIES[family](shared_data / "tokenizers/minimind", tmp_path / family)
    (folder / "chat_template.jinja").write_text(template(SHOWN[family], ""))
    rows = []
    for number, row in enumerate(images_with_answers(tmp_path, 8)):
        other = [{"role": "assistant", "content": f"Nothing {number}."}]
        rows.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": other, "images": row["images"]})
    settings = {
        "model.name": str(folder), "data.max_length": 512, "data.shuffle": False, "optim.max_steps": 2,
        "method.kind": method, "optim.per_device_train_batch_size": 4, "optim.gradient_accumulation_steps": 1,
        "adapter.kind": "none", "optim.optim": "sgd", "optim.learning_rate": RATE, "optim.lr_scheduler_type": "constant",
        "optim.max_grad_norm": 0, "optim.warmup_steps": 0, **SETTINGS[method],
    }  # fmt: skip
    run = train({"data.train": [{"path": source(rows)}], **settings})
    ours = [(event["loss"], event["grad_norm"]) for event in lines(run, "metrics") if "loss" in event]

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = real_processor(folder)

    def mean(row, answer):
        pictures = [Image.open(tmp_path / name).convert("RGB") for name in row["images"]]
        seen = [{"type": "image"} for _ in pictures]
        asked = [{"role": "user", "content": [*seen, {"type": "text", "text": row["prompt"][0]["content"]}]}]
        said = [{"role": "assistant", "content": [{"type": "text", "text": answer[0]["content"]}]}]
        texts = [
            processor.apply_chat_template(asked, add_generation_prompt=True),
            processor.apply_chat_template(asked + said),
        ]
        before, whole = (processor(text=[text], images=[pictures], return_tensors="pt") for text in texts)
        first, ids = before["input_ids"].shape[1], whole["input_ids"]
        assert ids[0, :first].tolist() == before["input_ids"][0].tolist()
        logps = model(**whole).logits[0, first - 1 : -1].float().log_softmax(-1)
        return logps.gather(1, ids[0, first:, None]).mean()

    theirs = []
    for batch in (rows[:4], rows[4:]):
        model.zero_grad()
        loss = torch.stack(
            [judged(method, mean(row, row["chosen"]), mean(row, row["rejected"])) for row in batch]
        ).mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        theirs.append((float(loss.detach()), float(norm)))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
    assert ours == [pytest.approx(each, rel=1e-4) for each in theirs]
