"""Greedy answers: the same alone and in a batch, right for every template, and without a trace in what is training."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.builtin import dates, tiny
from engine.data.chat import Chat
from engine.data.chat_template import MaskError
from engine.generate import answers_to, end_of_turn, generate, stop_ids

PROMPTS = [*dates.PROMPTS, "3.3.2021", "What is " + "the day before " * 12 + "3 March 2021 in ISO form?"]


@pytest.fixture(scope="module")
def base() -> tuple[Any, Any]:
    folder = tiny.folder()
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def learned(base: tuple[Any, Any]) -> tuple[Any, Any]:
    """The tiny model after it has learned one date by heart and to end its turn."""
    model, tokenizer = copy.deepcopy(base[0]), base[1]
    rows = [
        {
            "messages": [
                {"role": "user", "content": day.strftime("%d.%m.%Y")},
                {"role": "assistant", "content": day.isoformat()},
            ]
        }
        for _, day in dates.PINNED
    ]
    train(model, tokenizer, rows, steps=60)
    return model, tokenizer, rows  # type: ignore[return-value]


def train(model: Any, tokenizer: Any, rows: list[Any], steps: int, between: Any = None) -> list[float]:
    """Plain steps over `rows`, with the state of dropout drawn from torch's generator; the loss of each."""
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    model.train()
    losses = []
    for step in range(steps):
        if between:
            between(step)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def lora(model: Any) -> Any:
    torch.manual_seed(3)
    return get_peft_model(
        copy.deepcopy(model), LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear", init_lora_weights=False)
    )


def test_a_model_gives_each_prompt_the_same_answer_alone_and_in_a_batch(base: tuple[Any, Any]) -> None:
    model, tokenizer = base
    alone = [generate(model, tokenizer, [prompt], max_new_tokens=12)[0] for prompt in PROMPTS]
    assert generate(model, tokenizer, PROMPTS, max_new_tokens=12) == alone
    assert generate(model, tokenizer, PROMPTS, max_new_tokens=12, batch_size=2) == alone
    assert len(set(alone)) > 1


def test_an_answer_is_the_argmax_of_the_plain_forward_pass_token_by_token(base: tuple[Any, Any]) -> None:
    model, tokenizer = base
    text = f"<|im_start|>user\n{PROMPTS[0]}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert generate(model, tokenizer, [PROMPTS[0]], max_new_tokens=8) == [tokenizer.decode(ids[0, start:])]


def test_what_was_learned_is_answered_and_the_answer_ends_at_the_end_of_its_turn(learned: Any) -> None:
    model, tokenizer, rows = learned
    prompts = [row["messages"][0]["content"] for row in rows]
    assert generate(model, tokenizer, prompts) == [row["messages"][1]["content"] for row in rows]
    assert all(given == right for _, given, right in answers_to(model, tokenizer, rows))
    wrong = [{"messages": [rows[0]["messages"][0], {"role": "assistant", "content": "1999-01-01"}]}]
    assert answers_to(model, tokenizer, wrong) == [("03.03.2021", "2021-03-03", "1999-01-01")]


@pytest.mark.parametrize("adapted", [pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "lora"])
def test_losses_of_a_training_with_samples_equal_those_without_to_the_bit(base: Any, adapted: bool) -> None:
    rows = dates.rows("train", count=8)

    def losses(sample: bool, seed: int = 11) -> list[float]:
        model = lora(base[0]) if adapted else copy.deepcopy(base[0])
        if not adapted:
            model.config.attention_dropout = 0.2
            for module in model.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.2
        torch.manual_seed(seed)
        between = (lambda step: generate(model, base[1], PROMPTS[:2], max_new_tokens=4)) if sample else None
        return train(model, base[1], rows, steps=4, between=between)

    plain = losses(sample=False)
    assert losses(sample=True) == plain
    # The comparison means something: dropout draws numbers, so another random state gives other losses.
    assert losses(sample=False, seed=12) != plain


def test_training_mode_random_state_and_tokenizer_are_left_as_they_were(base: tuple[Any, Any]) -> None:
    model, tokenizer = copy.deepcopy(base[0]).train(), copy.deepcopy(base[1])
    model.model.layers[0].eval()  # someone froze a part
    model.config.use_cache = False  # as gradient checkpointing does
    model.gradient_checkpointing_enable()
    modes = [module.training for module in model.modules()]
    side, template = tokenizer.padding_side, tokenizer.chat_template
    torch.manual_seed(1)
    random.seed(1)
    state, own = torch.get_rng_state(), random.getstate()
    generate(model, tokenizer, PROMPTS, max_new_tokens=3)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == own
    assert (tokenizer.padding_side, tokenizer.chat_template) == (side, template)
    assert model.config.use_cache is False
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_modes_come_back_when_generating_fails(base: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(base[0]).train()
    monkeypatch.setattr(model, "generate", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, base[1], PROMPTS)
    assert all(module.training for module in model.modules())


def test_a_mixture_of_experts_that_reports_its_routers_answers_padded_prompts_and_reports_again(base: Any) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    more = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **more, output_router_logits=True))
    tokenizer, prompts = base[1], ["a", "a much longer prompt than that"]
    both = generate(model, tokenizer, prompts, max_new_tokens=4)
    assert both == [generate(model, tokenizer, [prompt], max_new_tokens=4)[0] for prompt in prompts]
    assert model.config.output_router_logits is True


def test_an_adapter_changes_the_answers_and_dropout_does_not(base: tuple[Any, Any]) -> None:
    adapted = lora(base[0]).train()
    first = generate(adapted, base[1], PROMPTS, max_new_tokens=8)
    assert generate(adapted, base[1], PROMPTS, max_new_tokens=8) == first
    with adapted.disable_adapter():
        assert generate(adapted, base[1], PROMPTS, max_new_tokens=8) == generate(
            base[0], base[1], PROMPTS, max_new_tokens=8
        )
    assert first != generate(base[0], base[1], PROMPTS, max_new_tokens=8)


def test_an_answer_stops_where_the_template_ends_a_turn_even_if_that_is_not_the_end_token(shared_data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "phi-3-mini")
    model = AutoModelForCausalLM.from_pretrained(tiny.folder(shared_data / "tokenizers" / "phi-3-mini"))
    stops = stop_ids(model, tokenizer, end_of_turn(tokenizer, Chat(tokenizer, tokenizer.chat_template)))
    ends = {tokenizer.convert_ids_to_tokens(token) for token in stops}
    assert ends == {"<|end|>", "<|endoftext|>"}


def test_a_model_without_a_template_continues_the_text(shared_data: Path) -> None:
    folder = shared_data / "weights" / "tinystories-llama-260k"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts = ["Once upon a time", "Once upon a time, there was a little girl named"]
    together = generate(model, tokenizer, prompts, max_new_tokens=16)
    assert together == [generate(model, tokenizer, [prompt], max_new_tokens=16)[0] for prompt in prompts]
    assert "there was" in together[0]


def test_a_text_goes_on_where_the_tokenizer_writes_an_end_token_behind_it(shared_data: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    folder = shared_data / "weights" / "tinystories-llama-260k"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    (plain,) = generate(model, tokenizer, ["Once upon a time"], max_new_tokens=8)
    ids, both = tokenizer("Once upon a time")["input_ids"], [("<s>", 1), ("</s>", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=both)
    assert tokenizer("Once upon a time")["input_ids"] == [*ids, 2]
    assert generate(model, tokenizer, ["Once upon a time"], max_new_tokens=8) == [plain]


def test_messages_so_far_can_be_the_prompt(base: tuple[Any, Any]) -> None:
    model, tokenizer = base
    as_messages = [{"role": "user", "content": PROMPTS[0]}]
    assert generate(model, tokenizer, [as_messages], max_new_tokens=6) == generate(
        model, tokenizer, [PROMPTS[0]], max_new_tokens=6
    )
    assert generate(model, tokenizer, [], max_new_tokens=6) == []


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}{{ 7 ** (messages | length * 10 ** 9) }}",
         "runs longer than 2 seconds"),
        ("{{ ('x' * 2000000000) | length }}", "needs too much memory"),
    ],
)  # fmt: skip
def test_a_template_is_rendered_for_samples_with_the_limits_that_it_has_for_data(
    base: Any, template: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.data.rendering.SECONDS", 0.3)
    tokenizer = copy.deepcopy(base[1])
    tokenizer.chat_template = template
    with pytest.raises(MaskError, match=sentence):
        generate(base[0], tokenizer, ["a"], max_new_tokens=2)
