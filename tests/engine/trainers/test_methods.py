"""Each method through the worker on real rows: its objective improves, and the receipt tells what was done."""

from __future__ import annotations

import json

import pytest

from tests.caches import own_cache
from tests.engine.trainers.building import Built
from tests.engine.trainers.conftest import PAIRS, RATED, STEPS, TEXTS, lines

LORA = {"adapter.kind": "lora", "adapter.r": 4}
BOTH = [pytest.param({}, marks=pytest.mark.slow), LORA]


def curve(run, name):
    return [event[name] for event in lines(run, "metrics") if name in event]


def told(run, feature):
    return next(entry for entry in lines(run, "receipt")[0]["entries"] if entry["feature"] == feature)


def real(shared_data, file, count=40):
    return {
        "data.train": [{"path": str(shared_data / file), "rows": count}],
        "data.max_length": 320,
        "data.excess_length": "drop",
    }


def test_kto_raises_good_answers_over_bad_ones(train, shared_data):
    settings = {"method.kind": "kto", **real(shared_data, "gsm8k/kto_rows.jsonl"), "optim.max_steps": 12}
    run = train({**settings, "optim.gradient_accumulation_steps": 1})
    margins = curve(run, "rewards/margins")
    assert abs(margins[0]) < 1e-5
    assert sum(margins[-4:]) / 4 > 0.05
    detail = told(run, "loss")["detail"]
    assert "reference: copy" in detail
    assert "good answers weigh" in detail


def test_kto_pairs_rows_in_the_batch_in_any_order(train, source):
    settings = {"method.kind": "kto", **LORA, "data.train": [{"path": source(RATED)}], "optim.max_steps": 3}
    seen = [train({**settings, "data.shuffle": shuffle}).batches.read_bytes() for shuffle in (True, False)]
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("kind", "adapter", "said"),
    [
        pytest.param("ipo", LORA, "reference: adapter off", marks=pytest.mark.slow),
        pytest.param("simpo", {}, "no reference model: none is loaded", marks=pytest.mark.slow),
        ("orpo", LORA, "no reference model: none is loaded"),
    ],
)
def test_right_solutions_rise_over_wrong_ones(train, shared_data, kind, adapter, said):
    settings = {"method.kind": kind, **adapter, **real(shared_data, "gsm8k/preference_pairs.jsonl", 24)}
    rate = {"optim.learning_rate": 1e-2} if adapter else {}
    run = train({**settings, **rate, "optim.gradient_accumulation_steps": 1, "optim.max_steps": 12})
    margins, losses = curve(run, "rewards/margins"), curve(run, "loss")
    assert sum(margins[-4:]) > sum(margins[:4])
    assert sum(losses[-4:]) < sum(losses[:4])
    assert all(0 <= share <= 1 for share in curve(run, "rewards/accuracies"))
    assert said in told(run, "loss")["detail"]
    if kind == "orpo":
        assert curve(run, "nll_loss")[-1] < curve(run, "nll_loss")[0]


@pytest.mark.parametrize("adapter", BOTH, ids=["full", "lora"])
def test_a_reward_model_scores_right_solutions_higher_and_so_does_what_was_saved(train, shared_data, adapter):
    import torch
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    settings = {"method.kind": "reward", **adapter, **real(shared_data, "gsm8k/preference_pairs.jsonl", 16)}
    settings |= {"optim.learning_rate": 1e-2 if adapter else 3e-3, "optim.gradient_accumulation_steps": 1}
    held_out = {"data.eval": settings["data.train"], "run.eval_steps": 16}
    run = train({**settings, **held_out, "optim.max_steps": 16, "run.save_steps": 16})
    assert sum(curve(run, "loss")[-4:]) < 0.8 * sum(curve(run, "loss")[:4])
    right = curve(run, "eval_accuracy")[-1]
    assert right > 0.85
    assert "no vocabulary head" in told(run, "loss")["detail"]
    folder = run.checkpoints / "checkpoint-16"
    loader = AutoPeftModelForSequenceClassification if adapter else AutoModelForSequenceClassification
    judge, tokenizer = loader.from_pretrained(folder, num_labels=1).eval(), AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (shared_data / "gsm8k/preference_pairs.jsonl").open()][:16]
    higher = []
    for row in rows:
        turns = [
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[part]}]
            for part in ("chosen", "rejected")
        ]
        ids = [
            tokenizer.apply_chat_template(each, return_tensors="pt", return_dict=True)["input_ids"] for each in turns
        ]
        if max(each.shape[1] for each in ids) > 320:
            continue
        with torch.no_grad():
            chosen, rejected = (judge(input_ids=each).logits.item() for each in ids)
        higher.append(chosen > rejected)
    assert sum(higher) / len(higher) == pytest.approx(right, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gdpo", "ppo"])
def test_answers_to_real_questions_earn_more_of_what_is_asked_for(train, shared_data, kind):
    """GRPO's own test of this is in test_grpo.py."""
    settings = {"method.kind": kind, **real(shared_data, "gsm8k/train_1000.jsonl", 60), "data.max_length": 200}
    settings |= {"method.reward_funcs": ["gsm8k", r"regex:^\D*$"], "method.max_completion_length": 8}
    settings |= {"optim.per_device_train_batch_size": 32, "optim.gradient_accumulation_steps": 1}
    settings |= {"optim.learning_rate": 1e-2, "optim.max_steps": 24, "run.save_steps": 24}
    own = {"gdpo": {"method.num_generations": 4}, "ppo": {"method.beta": 0.0, "method.value_learning_rate": 0.02}}
    run = train({**settings, **own[kind]})
    wordy = curve(run, "rewards/regex/mean")
    assert sum(wordy[-4:]) / 4 > sum(wordy[:2]) / 2 + 0.2
    assert "gsm8k x 1 (first rows' own answers: 1.00)" in told(run, "loss")["detail"]


@pytest.mark.slow
def test_the_new_head_of_a_reward_model_is_not_quantized(train, source):
    settings = {"method.kind": "reward", **LORA, "model.quantization": "nf4", "data.train": [{"path": source(PAIRS)}]}
    run = train({**settings, "optim.max_steps": 2})
    assert told(run, "quantization")["count"]
    assert curve(run, "loss")[1] < curve(run, "loss")[0]


def test_distillation_brings_a_model_near_its_teacher(train, source, shared_data):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shared_data / "weights/tinystories-llama-260k"
    teacher, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer((shared_data / "tinyshakespeare/input_first_900k.txt").read_text("utf-8")[:4000])["input_ids"]
    rows = []
    for start in range(0, 640, 40):
        window = torch.tensor([ids[start : start + 40]])
        with torch.no_grad():
            top = teacher(input_ids=window).logits[0].log_softmax(-1).topk(8)
        rows.append(
            {
                "input_ids": window[0].tolist(),
                "target_token_ids": [[], *top.indices[:-1].tolist()],
                "target_logprobs": [[], *top.values[:-1].tolist()],
            }
        )
    settings = {"method.kind": "distill", "model.tokenizer": str(folder), "data.train": [{"path": source(rows)}]}
    settings |= {"optim.learning_rate": 5e-3, "optim.gradient_accumulation_steps": 1, "optim.max_steps": 16}
    run = train({**settings, "method.kd_ce_alpha": 0.0})
    divergence = curve(run, "kl")
    assert sum(divergence[-3:]) < 0.8 * sum(divergence[:3])
    assert "0.9 x KL from the teacher, 0 x cross-entropy" in told(run, "loss")["detail"]
    assert lines(run, "metrics")[0]["trained_tokens"] == 4 * 39


@pytest.mark.parametrize(
    ("adapter", "pooling"), [pytest.param({}, "mean", marks=pytest.mark.slow), (LORA, "last")], ids=["full", "lora"]
)
def test_an_embedding_model_finds_more_held_out_captions_and_its_loss_falls(
    train, source, shared_data, adapter, pooling
):
    scored = [json.loads(line) for line in (shared_data / "stsb/stsb_en_images_train_1000.jsonl").open()]
    alike = [{"anchor": row["sentence1"], "positive": row["sentence2"]} for row in scored if row["score"] >= 4.5]
    settings = {"method.kind": "embedding", "method.pooling": pooling, **adapter, "optim.max_steps": 12}
    settings |= {"data.train": [{"path": source(alike[:96])}], "data.eval": [{"path": source(alike[-40:])}]}
    settings |= {"optim.per_device_train_batch_size": 16, "optim.gradient_accumulation_steps": 1, "run.eval_steps": 1}
    run = train({**settings, "optim.learning_rate": 1e-2 if adapter else 2e-3, "run.save_steps": 12})
    found = curve(run, "eval_recall@5")
    assert found[-1] > found[0] + 0.1
    assert found[-1] >= curve(run, "eval_recall@1")[-1]
    assert sum(curve(run, "loss")[-3:]) < 0.9 * sum(curve(run, "loss")[:3])
    assert "no vocabulary head" in told(run, "loss")["detail"]
    assert lines(run, "metrics")[0]["trained_tokens"] == lines(run, "metrics")[0]["tokens"]


@pytest.mark.parametrize(("kind", "rows"), [("embedding", TEXTS), ("prm", STEPS)])
def test_a_model_in_16_bits_is_judged_in_32(tmp_path, monkeypatch, kind, rows):
    import torch

    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({"method.kind": kind}, rows, tmp_path)
    built.model.bfloat16()
    loss = built.trainer.compute_loss(built.model, dict(built.collate(built.rows)))
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("how", ["mean", "last", "first"])
def test_a_vector_of_16_bits_loses_nothing_more(how):
    import torch

    from engine.trainers.embedding import pooled

    torch.manual_seed(0)
    hidden, mask = torch.randn(3, 5, 64).bfloat16(), torch.tensor([[1] * 5, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    assert torch.allclose(pooled(hidden, mask, how).double(), pooled(hidden.double(), mask, how), rtol=1e-6, atol=1e-7)


def test_recall_counts_how_many_lie_nearer():
    import torch

    from engine.trainers.embedding import recall

    texts = torch.eye(12)
    anchors = texts.clone()
    anchors[0] = texts[1] * 0.9 + texts[0] * 0.1  # its own text is second
    assert recall(anchors, texts) == pytest.approx({1: 11 / 12, 5: 1.0, 10: 1.0})
    assert recall(anchors[:3], texts[:3]) == pytest.approx({1: 2 / 3})


def test_scored_pairs_of_captions_rank_better_and_the_folder_is_one_of_sentence_transformers(
    train, source, shared_data
):
    import torch
    from sentence_transformers import SentenceTransformer

    scored = [json.loads(line) for line in (shared_data / "stsb/stsb_en_images_train_1000.jsonl").open()]
    settings = {"method.kind": "embedding", "data.train": [{"path": source(scored[:160])}], "optim.max_steps": 12}
    settings |= {"data.eval": [{"path": source(scored[-80:])}], "optim.gradient_accumulation_steps": 1}
    settings |= {"optim.per_device_train_batch_size": 16, "run.eval_steps": 12, "run.save_steps": 12}
    run = train({**settings, "optim.learning_rate": 2e-3, "data.max_length": 256})
    assert sum(curve(run, "loss")[-3:]) < 0.95 * sum(curve(run, "loss")[:3])
    assert "rank by their scores" in told(run, "loss")["detail"]
    model = SentenceTransformer(str(run.checkpoints / "checkpoint-12"), device="cpu")
    first, second = (model.encode([row[name] for row in scored[-80:]]) for name in ("sentence1", "sentence2"))
    assert model.max_seq_length == 256
    from engine.trainers.embedding import spearman

    found = spearman(torch.tensor((first * second).sum(1)), torch.tensor([row["score"] for row in scored[-80:]]))
    assert found == pytest.approx(curve(run, "eval_spearman_cosine")[-1], abs=1e-4)
    assert found > 0.1


def test_held_out_texts_are_of_the_same_sort_as_those_to_learn(train, source):
    scored = [{"sentence1": "a dog", "sentence2": f"dog {place}", "score": place} for place in range(8)]
    pairs = [{"anchor": "a dog", "positive": f"dog {place}"} for place in range(8)]
    settings = {"method.kind": "embedding", "data.train": [{"path": source(scored)}]}
    run = train({**settings, "data.eval": [{"path": source(pairs)}]}, code=1)
    assert "the rows of data.train have a score and those of data.eval have none" in lines(run, "failed")[0]["message"]
    mixed = train(
        {**settings, "data.eval": [{"path": source([*({**pair, "score": 1} for pair in pairs), *pairs])}]}, code=1
    )
    assert "8 rows with a score and 8 rows without a score" in lines(mixed, "failed")[0]["message"]


def test_rank_correlation_shares_the_ranks_of_equal_numbers():
    import torch
    from scipy.stats import spearmanr

    from engine.trainers.embedding import spearman

    first, second = torch.tensor([3.0, 1.0, 1.0, 7.0, 2.0]), torch.tensor([1.0, 0.0, 5.0, 5.0, 5.0])
    assert spearman(first, second) == pytest.approx(spearmanr(first, second).statistic)


@pytest.mark.parametrize("adapter", BOTH, ids=["full", "lora"])
def test_a_process_reward_model_tells_a_foreign_step_from_one_of_the_solution(train, source, shared_data, adapter):
    solved = [json.loads(line) for line in (shared_data / "gsm8k/train_1000.jsonl").open()][:40]
    parts = [row["answer"].split("\n") for row in solved]
    rows = [
        {"prompt": row["question"][:120], "completions": [own[0], "####" * 3 + other[-1]], "labels": [True, False]}
        for row, own, other in zip(solved, parts, parts[1:] + parts[:1], strict=True)
    ]
    settings = {"method.kind": "prm", **adapter, "data.train": [{"path": source(rows)}], "data.max_length": 512}
    settings |= {"data.eval": [{"path": source(rows[:8])}], "run.eval_steps": 12, "optim.max_steps": 12}
    settings |= {"optim.gradient_accumulation_steps": 1, "optim.learning_rate": 1e-2 if adapter else 3e-3}
    run = train(settings)
    assert sum(curve(run, "loss")[-3:]) < 0.7 * sum(curve(run, "loss")[:3])
    assert curve(run, "eval_accuracy")[-1] > 0.85
    assert curve(run, "margin")[-1] > curve(run, "margin")[0]
    assert lines(run, "metrics")[0]["trained_tokens"] == 8
    assert "no vocabulary head" in told(run, "loss")["detail"]
