"""Attention over packs by measurement: the fastest that computes the same is taken, kept for later launches, and told."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.config.facts import DataFacts, Facts, ModelFacts
from engine.data.gather_facts import gather_facts
from engine.facts import attention_times
from engine.features.attention_backend import backend, timing
from engine.features.attention_backend.apply import beginnings
from engine.hardware import parse_machine
from engine.planning.auto import resolved
from engine.rules import read

PACKAGES = {"nvidia-cudnn-frontend": "1.18.0", "flash-attn": "2.8"}
MODEL = ModelFacts("builtin/tiny", heads=4, kv_heads=2, head_dim=8, model_type="qwen3", hidden_size=32)
FACTS = Facts(machine=parse_machine("1xH100-80GB"), model=MODEL, packages=PACKAGES, data=DataFacts(lengths=(5, 9, 40)))
CONFIG = read(
    {
        "model": {"name": "builtin/tiny", "attention": "cudnn"}, "kernels": {"torch_compile": False},
        "data": {"train": [{"path": "rows.jsonl"}], "packing": True, "packing_cross_doc_attn_mask": True, "max_length": 64},
        "optim": {"per_device_train_batch_size": 2},
    }
).config  # fmt: skip


def attention(seconds=0.0, off=0.0, problem=None):
    """Attention over documents by plain torch, slow or wrong as asked."""

    def attend(module, q, k, v, mask, scaling, dropout, cu_seq_lens_q, **more):
        if problem is not None and q.shape[2] < 164:  # of the batch that is timed, not of the trial
            raise RuntimeError(problem)
        time.sleep(seconds)
        k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
        parts = zip(*(x.split(cu_seq_lens_q.diff().tolist(), 2) for x in (q, k, v)), strict=True)
        each = [
            torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, scale=scaling) for part in parts
        ]
        return torch.cat(each, 2).transpose(1, 2) * (1 + off), None

    return attend


@pytest.fixture
def implementations(monkeypatch, tmp_path):
    """Those that are named are computed so, on this machine's clock; what is kept lies in a folder of the test."""
    monkeypatch.setattr(timing, "OURS", {})
    monkeypatch.setattr(backend, "OURS", {})
    monkeypatch.setattr(
        timing, "position_kwargs", lambda name, positions: {"position_ids": positions, **beginnings(positions)}
    )
    monkeypatch.setattr(timing, "ROUNDS", 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "H100")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def put(**functions):
        for name, function in functions.items():
            monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, function)

    return put


def decide(config=CONFIG, facts=FACTS):
    return timing.decide(config, facts, torch.device("cpu"))


def test_the_fastest_that_computes_the_same_is_taken_kept_and_known_to_the_next_launch(implementations, monkeypatch):
    implementations(
        cudnn=attention(seconds=0.02), flash_attention_2=attention(off=0.2), varlen=attention(seconds=0.002)
    )
    taken, why = decide()
    assert taken == "varlen"
    assert "measured here: cudnn " in why
    assert "flash_attention_2 left out: its output differs from torch's own by 20.0%" in why
    name = attention_times.key(CONFIG, MODEL, FACTS.data, "H100")
    assert "128 tokens, documents of 16" in name
    times = attention_times.known(name)
    assert set(times) == {"cudnn", "varlen"}
    assert times["cudnn"] > times["varlen"]
    auto = CONFIG.with_values({timing.SETTING: "auto"})
    facts = replace(FACTS, packages={"nvidia-cudnn-frontend": "1.18.0"}, attention_times=times)
    assert resolved(auto, facts).model.attention == "varlen"
    # What is known is not measured again.
    monkeypatch.setattr(timing, "measure", None)
    assert decide(facts=facts)[0] == "varlen"


def test_one_that_fails_on_the_batch_is_left_out_and_the_order_stands_within_3_percent(implementations, monkeypatch):
    implementations(cudnn=attention(), flash_attention_2=attention(problem="no kernel image"), varlen=attention())
    monkeypatch.setattr(timing.statistics, "median", lambda all_: 1.0)
    taken, why = decide()
    assert (taken, "flash_attention_2 left out: no kernel image" in why) == ("cudnn", True)


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (CONFIG, replace(FACTS, packages={})),
        (CONFIG, replace(FACTS, model=ModelFacts("builtin/tiny", heads=4))),
        (CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"full_determinism": True})}), FACTS),
        (CONFIG.model_copy(update={"data": CONFIG.data.model_copy(update={"packing": False})}), FACTS),
    ],
)
def test_where_there_is_nothing_to_choose_or_numbers_must_repeat_nothing_is_measured(implementations, config, facts):
    assert decide(config, facts) is None


def test_a_damaged_record_is_none_and_random_numbers_stay(implementations, tmp_path):
    implementations(cudnn=attention(), flash_attention_2=attention(), varlen=attention())
    before = torch.get_rng_state()
    decide()
    assert torch.equal(torch.get_rng_state(), before)
    file = tmp_path / attention_times.FILE
    (name,) = json.loads(file.read_text())
    for entry in ({"cudnn": -1.0}, {"cudnn": "fast"}, {}, 7):
        file.write_text(json.dumps({name: entry}))
        assert attention_times.known(name) == {}
    file.write_text("{")
    assert attention_times.known(name) == {}
    assert gather_facts(CONFIG, tmp_path, parse_machine("1xH100-80GB")).attention_times is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_card_what_is_installed_has_a_time_and_agrees_with_torchs_own(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = ModelFacts("builtin/tiny", heads=32, kv_heads=8, head_dim=128)
    config = CONFIG.with_values({timing.SETTING: "auto"})
    facts = replace(gather_facts(config, tmp_path), model=model)
    device = torch.device("cuda", torch.cuda.current_device())
    order = timing.candidates(config, facts)
    assert "varlen" in order
    begun = time.monotonic()
    times, problems = timing.measure(order, model, config, (8192, 1024), device)
    print(torch.cuda.get_device_name(), times, problems, f"{time.monotonic() - begun:.1f} s in all")
    assert set(times) == set(order) - set(problems)
    assert 0.2 < times["varlen"] < 20
    taken = timing.decide(config, facts, device)
    assert (taken is None) is (len(times) < 2)
