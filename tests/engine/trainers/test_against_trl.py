"""Our SFT and DPO equal plain TRL scripts that prepare the raw messages themselves: masks, losses and gradients."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines

# Marks what an assistant says for TRL, whose own mask needs the marks; ours must find the same tokens without using them.
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


@pytest.fixture
def plain(tmp_path):
    """Model, tokenizer and arguments of a script that knows nothing of the workbench but the model folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from engine.builtin import tiny

    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(tiny.folder(), dtype=torch.float32)
    arguments = {
        "output_dir": str(tmp_path / "plain"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 10,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "seed": 42,
        "data_seed": 42,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return model, tokenizer, arguments


@pytest.fixture
def template_file(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def steps(history):
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]


def test_sft_losses_and_masks_are_trls_own(train, source, plain, template_file):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer, arguments = plain
    theirs = SFTTrainer(
        model=model,
        args=SFTConfig(**arguments, assistant_only_loss=True, max_length=128),
        train_dataset=Dataset.from_list([{"messages": row} for row in CONVERSATIONS]),
        processing_class=tokenizer,
    )
    theirs.train()
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "model.chat_template": template_file})
    assert steps(lines(run, "metrics")) == pytest.approx(steps(theirs.state.log_history), rel=1e-6)

    from engine.data.prepare import prepare
    from engine.models.load import load_processing_class
    from engine.worker import _config

    config = _config(run)
    prepared = prepare(config, load_processing_class(config)).dataset
    for ours, reference in zip(prepared, theirs.train_dataset, strict=True):
        assert ours["input_ids"] == reference["input_ids"]
        assert ours["labels"] == reference["labels"]


def test_dpo_losses_and_margins_are_trls_own(train, source, plain, template_file):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    from engine.builtin import tiny

    model, tokenizer, arguments = plain
    theirs = DPOTrainer(
        model=model,
        ref_model=AutoModelForCausalLM.from_pretrained(tiny.folder(), dtype=torch.float32),
        args=DPOConfig(**arguments, max_length=128),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=tokenizer,
    )
    theirs.train()
    run = train({"method.kind": "dpo", "data.train": [{"path": source(PAIRS)}], "model.chat_template": template_file})
    ours = lines(run, "metrics")
    assert steps(ours) == pytest.approx(steps(theirs.state.log_history), rel=1e-6)
    margins = [entry["rewards/margins"] for entry in theirs.state.log_history if "rewards/margins" in entry]
    assert [event["rewards/margins"] for event in ours] == pytest.approx(margins, rel=1e-5, abs=1e-7)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_curves_of_pairs_without_a_reference_mean_what_trls_mean(train, source, plain, template_file, kind):
    """Before the first step, since ORPO's own trainer learns the prompt too: rewards, and log-probabilities a token."""
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    model, tokenizer, arguments = plain
    given = {**arguments, "max_steps": 1, "max_length": 128, "remove_unused_columns": False}
    if kind == "simpo":
        config, trainer = CPOConfig(**given, loss_type="simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0), CPOTrainer
    else:
        config, trainer = ORPOConfig(**given), ORPOTrainer
    theirs = trainer(model=model, args=config, train_dataset=Dataset.from_list(PAIRS), processing_class=tokenizer)
    theirs.train()
    settings = {"method.kind": kind, "data.train": [{"path": source(PAIRS)}], "optim.max_steps": 1}
    ours = lines(train({**settings, "model.chat_template": template_file}), "metrics")[0]
    told = {
        name: value for name, value in theirs.state.log_history[0].items() if name.startswith(("rewards/", "logps/"))
    }
    assert len(told) == 6
    assert {name: ours[name] for name in told} == pytest.approx(told, rel=1e-5, abs=1e-6)


def images_with_answers(folder, count=24):
    """Rows of a prompt with one or two images and an answer, and the images beside them."""
    from PIL import Image

    rows = []
    for number in range(count):
        names = [f"{number}-{place}.png" for place in range(1 + number % 2)]
        for place, name in enumerate(names):
            size = (40 + 8 * (number % 3), 30 + 20 * place)
            Image.new("RGB", size, (number * 10, 255 - number * 10, 60 * place)).save(folder / name)
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"What is in {len(names)} of number {number}?"}],
                "completion": [{"role": "assistant", "content": f"Shade {number} and no other."}],
                "images": names,
            }
        )
    return rows


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen2_5_vl", "messages"),
        pytest.param("idefics3", "prompt and completion", marks=pytest.mark.slow),
        pytest.param("idefics3", "messages", marks=pytest.mark.slow),
        *(
            pytest.param(name, "messages", marks=pytest.mark.slow)
            for name in ("gemma3", "qwen3_vl", "internvl", "glm4v", "smolvlm")
        ),
    ],
)
def test_sft_losses_on_images_are_trls_own(train, source, tmp_path, shared_data, family, kind):
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoModelForImageTextToText
    from trl import SFTConfig, SFTTrainer

    from tests.engine.seeing import FAMILIES, real_processor, template

    if kind == "messages" and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("TRL 1.16 learns answers about images alone from transformers 5.18 on")
    folder = FAMILIES[family](shared_data / "tokenizers/minimind", tmp_path / family)
    rows = images_with_answers(tmp_path)
    if kind == "messages":
        rows = [{"messages": row["prompt"] + row["completion"], "images": row["images"]} for row in rows]
    else:
        # Of a completion TRL learns the line break behind its end too, which is the template's: here there is none.
        (folder / "chat_template.jinja").write_text(template("<image>", ""))
    theirs = SFTTrainer(
        model=AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32),
        args=SFTConfig(
            output_dir=str(tmp_path / "plain"),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=5,
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
            max_length=None,
            assistant_only_loss=kind == "messages",
        ),
        train_dataset=Dataset.from_list(
            [{**row, "images": [Image.open(tmp_path / name).copy() for name in row["images"]]} for row in rows]
        ),
        processing_class=real_processor(folder),
    )
    theirs.train()
    settings = {"model.name": str(folder), "data.max_length": 512, "optim.max_steps": 5}
    settings["data.image_backend"] = theirs.processing_class.image_processor.backend
    run = train({"data.train": [{"path": source(rows)}], **settings})
    ours = steps(lines(run, "metrics"))
    assert len(ours) == 5
    assert ours == pytest.approx(steps(theirs.state.log_history), rel=1e-6)
    assert (run.checkpoints / "checkpoint-5" / "processor_config.json").is_file()


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("dpo", "qwen2_5_vl"),
        *(
            pytest.param(kind, name, marks=pytest.mark.slow)
            for kind, name in (
                ("kto", "idefics3"),
                ("dpo", "idefics3"),
                ("dpo", "gemma3"),
                ("kto", "qwen2_5_vl"),
                ("kto", "gemma3"),
            )
        ),
    ],
)
def test_losses_of_preferences_on_images_are_trls_own(train, source, tmp_path, shared_data, method, family):
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoModelForImageTextToText
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    from tests.engine.seeing import FAMILIES, real_processor, template

    folder = FAMILIES[family](shared_data / "tokenizers/minimind", tmp_path / family)
    # TRL learns the line break behind an answer's end too, which is the template's: here there is none.
    shown = {"idefics3": "<image>", "gemma3": "<start_of_image>"}
    text = (folder / "chat_template.jinja").read_text()
    own = shown.get(family, "<|vision_start|><|image_pad|><|vision_end|>")
    assert own in text
    (folder / "chat_template.jinja").write_text(template(own, ""))
    rows = []
    for number, row in enumerate(images_with_answers(tmp_path)):
        prompt, answer = row["prompt"], row["completion"]
        other = [{"role": "assistant", "content": f"Nothing {number}."}]
        answers = {"chosen": answer, "rejected": other}
        if method == "kto":
            answers = {"completion": other if number % 2 else answer, "label": number % 2 == 0}
        rows.append({"prompt": prompt, **answers, "images": row["images"]})
    config, trainer = (DPOConfig, DPOTrainer) if method == "dpo" else (KTOConfig, KTOTrainer)
    more = {} if method == "dpo" else {"train_sampling_strategy": "sequential"}
    theirs = trainer(
        model=AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32),
        ref_model=AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32),
        args=config(
            output_dir=str(tmp_path / "plain"),
            per_device_train_batch_size=4,
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
            max_length=None,
            **more,
        ),
        train_dataset=Dataset.from_list(
            [{**row, "images": [Image.open(tmp_path / name).copy() for name in row["images"]]} for row in rows]
        ),
        processing_class=real_processor(folder),
    )
    theirs.train()
    settings = {
        "model.name": str(folder),
        "data.max_length": 512,
        "optim.max_steps": 4,
        "data.shuffle": method == "dpo",
        "data.image_backend": theirs.processing_class.image_processor.backend,
    }
    settings |= {"method.kind": method, "optim.gradient_accumulation_steps": 1, "adapter.kind": "none"}
    ours = steps(lines(train({"data.train": [{"path": source(rows)}], **settings}), "metrics"))
    assert len(ours) == 4
    assert ours == pytest.approx(steps(theirs.state.log_history), rel=1e-5)
