"""Several rewards at once, reward models among them, and the call before training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.errors import ModelError, WorkbenchError
from engine.rewards.scoring import Rewards

CPU = torch.device("cpu")


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def row(number: int, prompt: object, **columns: object) -> dict[str, object]:
    return {"prompt": json.dumps(prompt), "columns": json.dumps(columns), "row": number}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model: the built-in tiny one with a scoring head, saved whole."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from engine.builtin import tiny

    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    model = AutoModelForSequenceClassification.from_pretrained(tiny.folder(), num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_every_reward_is_a_column_and_what_does_not_apply_is_nan(tmp_path: Path) -> None:
    rewards = Rewards(["2 * exact_match", "length:1"], 20.0, CPU)
    found = rewards.score(["a", "b"], ["7", "x"], [[1], [1, 2]], {"answer": ["7", None]}, [0, 1])
    rewards.close()
    assert rewards.weights == [2.0, 1.0]
    assert torch.equal(found.nan_to_num(-1), torch.tensor([[1.0, 1.0], [-1.0, 0.0]]))


def test_a_reward_model_scores_the_whole_conversation(judge: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rewards = Rewards([f"model:{judge}"], 20.0, CPU)
    prompts = [[{"role": "user", "content": text}] for text in ("What is 3 May 2021?", "?")] * 10
    answers = [[{"role": "assistant", "content": text}] for text in ("2021-05-03", "x")] * 10
    found = rewards.score(prompts, answers, [[1]] * 20, {}, list(range(20)))[:, 0]
    tokenizer, model = AutoTokenizer.from_pretrained(judge), AutoModelForSequenceClassification.from_pretrained(judge)
    for place in (0, 1):
        text = tokenizer.apply_chat_template([*prompts[place], *answers[place]], tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        expected = model(input_ids=ids).logits[0, 0].item()
        assert found[place].item() == pytest.approx(expected, rel=1e-4)
    assert found[0] != found[1]


@pytest.mark.parametrize("break_at", ["compile", pytest.param("render", marks=pytest.mark.slow)])
def test_the_template_of_a_reward_model_cannot_hold_the_run_up(
    judge: Path, tmp_path: Path, break_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr("engine.data.rendering.SECONDS", 0.3)

    folder = tmp_path / "judge"
    shutil.copytree(judge, folder)
    for file in folder.glob("*.jinja"):
        file.unlink()
    power = "10 ** 9" if break_at == "compile" else "messages | length * 10 ** 9"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages[0].content }}{{ 7 ** (" + power + ") }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    rewards = Rewards([f"model:{folder}"], 20.0, CPU)
    asked = [[{"role": "user", "content": "?"}]], [[{"role": "assistant", "content": "x"}]]
    with pytest.raises(WorkbenchError, match=r"method\.reward_funcs: .*judge.* runs longer than 2 seconds") as caught:
        rewards.score(*asked, [[1]], {}, [0])
    assert caught.value.hint == "Name another reward model."


def test_a_model_without_a_scoring_head_is_refused() -> None:
    from engine.builtin import tiny

    with pytest.raises(ModelError, match="has no head that gives one score"):
        Rewards([f"model:{tiny.folder()}"], 20.0, CPU).start()
    with pytest.raises(ModelError, match=r"the reward model .*absent cannot be loaded") as caught:
        Rewards(["model:/absent"], 20.0, CPU).start()
    assert "a model with a scoring head" in caught.value.hint


@pytest.mark.parametrize("task", ["SEQ_CLS", "CAUSAL_LM"])
def test_an_adapter_that_was_trained_to_score_is_a_reward_model_and_one_that_writes_is_none(
    tmp_path: Path, task: str
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from engine.builtin import tiny

    scores = task == "SEQ_CLS"
    kind, more = (AutoModelForSequenceClassification, {"num_labels": 1}) if scores else (AutoModelForCausalLM, {})
    model = get_peft_model(kind.from_pretrained(tiny.folder(), **more), LoraConfig(task_type=task)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "score" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    tokenizer.save_pretrained(tmp_path)
    rewards = Rewards([f"model:{tmp_path}"], 20.0, CPU)
    if not scores:
        with pytest.raises(ModelError, match="has no head that gives one score"):
            rewards.start()
        return
    prompt, answer = [{"role": "user", "content": "?"}], [{"role": "assistant", "content": "2021-05-03"}]
    text = tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    model.config.pad_token_id = tokenizer.pad_token_id
    expected = model(input_ids=ids).logits[0, 0].item()
    assert rewards.score([prompt], [answer], [[1]], {}, [0]).item() == pytest.approx(expected, rel=1e-4)
    with model.disable_adapter():
        assert model(input_ids=ids).logits[0, 0].item() != pytest.approx(expected, rel=1e-2)


def test_a_model_whose_score_is_no_number_ends_the_run_in_place_of_counting_as_not_applying(judge: Path) -> None:
    rewards = Rewards([f"model:{judge}"], 20.0, CPU)
    rewards.start()
    with torch.no_grad():
        next(iter(rewards._models.values())).model.score.weight.fill_(float("nan"))
    with pytest.raises(
        WorkbenchError, match=r"the reward model .* must give finite numbers .*; got nan \(row 7 of the data"
    ):
        rewards.score(["a"], ["b"], [[1]], {}, [7])


@pytest.mark.parametrize("weight", ["", "1e16 * "])
def test_rewards_too_large_for_their_differences_to_count_are_refused(tmp_path: Path, weight: str) -> None:
    (tmp_path / "mine.py").write_text(f"def far(completions):\n    return [0, {1 if weight else 1e30}]\n")
    rewards = Rewards([f"{weight}{tmp_path}/mine.py:far"], 20.0, CPU)
    with pytest.raises(WorkbenchError, match=r"mine.py:far must give finite .* at most 1e\+15 .*\(row 5 of") as caught:
        rewards.score(["a", "a"], ["b", "c"], [[1], [2]], {}, [4, 5])
    rewards.close()
    assert "Scale them down" in caught.value.hint


def test_the_call_before_training_finds_a_function_that_fails_on_an_empty_answer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def first(completions):\n    return [ord(each[0]) for each in completions]\n")
    rewards = Rewards([f"{tmp_path}/mine.py:first"], 20.0, CPU)
    rows = [row(number, "a", answer="yes") for number in range(6)]
    with pytest.raises(WorkbenchError, match=r"mine.py:first raised IndexError: .* \(row 0 of the data\)"):
        rewards.dry_run(rows, Letters())
    rewards.close()


def test_the_call_before_training_scores_the_rows_own_answers() -> None:
    rewards = Rewards(["exact_match", "length:2"], 20.0, CPU)
    rows = [row(number, [{"role": "user", "content": "?"}], answer="yes") for number in range(2)]
    found = rewards.dry_run([*rows, row(2, [{"role": "user", "content": "?"}])], Letters())
    assert found.tolist() == [[1, 0.5], [1, 0.5]], "a row without an answer has none to score"
    rewards.close()


@pytest.mark.parametrize("text", ["exact_match", "gsm8k"])
def test_rows_without_answers_are_refused_before_training_and_a_batch_without_is_passed_over(text: str) -> None:
    rewards = Rewards([text, "length:2"], 20.0, CPU)
    with pytest.raises(WorkbenchError, match=f"{text} compares with the row's answer, and the rows .* none") as caught:
        rewards.dry_run([row(number, "a") for number in range(6)], Letters())
    assert "data.train columns" in caught.value.hint
    rewards.dry_run([*(row(number, "a") for number in range(6)), row(6, "a", answer="7")], Letters())
    assert rewards.score(["a"], ["7"], [[1]], {}, [0])[0].nan_to_num(-1).tolist() == [-1, 1]
    rewards.close()
