"""Our configs written for another tool and taken over again mean the same, but for what the ledger calls changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.bridge.giving import LEARNED, refused
from engine.bridge.ledger import Ledger
from engine.bridge.tools import TOOLS, export, take_over
from engine.config.data import DataSource
from engine.config.facts import Facts
from engine.config.files import as_yaml, parse
from engine.config.tree import RunConfig, fields_of
from engine.planning.auto import AUTO
from engine.rules import read

HERE = Path("/nowhere")
ROWS = {
    "sft": "messages", "pretrain": "text", "dpo": "preference", "ipo": "preference", "simpo": "preference",
    "orpo": "preference", "reward": "preference", "kto": "unpaired_preference",
}  # fmt: skip
TARGETS = {
    "axolotl": ("sft", "pretrain", "dpo", "ipo", "simpo", "orpo", "reward", "kto"),
    "trl": ("sft", "pretrain", "dpo", "ipo", "reward", "kto"),
}
NUMBERS = st.sampled_from([0.05, 0.1, 0.5, 1.0, 2.0])


def methods(kinds: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    of = {
        "dpo": {"beta": NUMBERS, "loss_type": st.sampled_from(["sigmoid", "hinge", "robust"]), "reference": st.sampled_from(["auto", "precompute"])},
        "ipo": {"beta": NUMBERS},
        "simpo": {"beta": NUMBERS, "simpo_gamma": NUMBERS, "cpo_alpha": NUMBERS},
        "orpo": {"beta": NUMBERS},
        "reward": {"center_rewards_coefficient": st.sampled_from([None, 0.01])},
        "kto": {"beta": NUMBERS, "desirable_weight": NUMBERS, "undesirable_weight": NUMBERS, "balance_weights": st.just(False)},
    }  # fmt: skip
    return st.one_of([st.fixed_dictionaries({"kind": st.just(kind), **of.get(kind, {})}) for kind in kinds])


ADAPTERS = st.one_of(
    st.just({"kind": "none"}),
    st.fixed_dictionaries(
        {
            "kind": st.just("lora"),
            "r": st.integers(1, 64),
            "lora_alpha": st.integers(1, 64),
            "target_modules": st.sampled_from(["all-linear", ["q_proj", "v_proj"], r".*\.mlp\..*"]),
            "modules_to_save": st.sampled_from([[], ["embed_tokens", "lm_head"]]),
            "use_rslora": st.booleans(),
            "use_dora": st.booleans(),
            "autocast_adapter_dtype": st.booleans(),
            "loraplus_lr_ratio": st.sampled_from([None, None, 8.0]),
        }
    ),
    st.just({"kind": "lora", "path": "/nowhere/adapter"}),
)
OPTIM = st.fixed_dictionaries(
    {
        "learning_rate": st.sampled_from(["auto", 1e-5, 3e-4]),
        "per_device_train_batch_size": st.integers(2, 8),
        "gradient_accumulation_steps": st.integers(1, 8),
        "num_train_epochs": st.sampled_from([1.0, 2.5]),
        "max_steps": st.sampled_from([None, 100]),
        "optim": st.sampled_from(["adamw_torch", "adamw_torch_fused", "adamw_8bit", "lion_8bit", "adopt", "muon"]),
        "lr_scheduler_type": st.sampled_from(["linear", "cosine", "constant_with_warmup"]),
        "warmup_steps": st.sampled_from([0.0, 0.03, 10.0]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "max_grad_norm": st.sampled_from([0.5, 1.0]),
    }
)


@st.composite
def configs(draw: st.DrawFn, tool: str) -> dict[str, Any]:
    """Configs of the methods that the tool has, some of them with a setting that it cannot say."""
    method, adapter, optim = draw(methods(TARGETS[tool])), draw(ADAPTERS), draw(OPTIM)
    kind = method["kind"]
    template = draw(st.sampled_from(["chatml", "llama3"])) if kind == "kto" and tool == "axolotl" else None
    packing = draw(st.booleans()) if kind in ("sft", "pretrain") else False
    bits = draw(st.sampled_from(["none", "nf4", "fp4", "int8"])) if adapter["kind"] == "lora" else "none"
    data: dict[str, Any] = {
        "train": [{"path": "owner/rows", "format": ROWS[kind], "split": "train"}],
        "max_length": draw(st.sampled_from([256, 4096])),
        "excess_length": "split"
        if kind == "pretrain" and packing
        else draw(st.sampled_from(["error", "truncate", "drop"])),
        "packing": packing,
        "packing_cross_doc_attn_mask": packing,
        "shuffle": draw(st.booleans()),
    }
    if kind == "sft":
        data["trained_turns"] = draw(st.sampled_from(["assistant", "all", "last"]))
    return {
        "version": 1,
        "model": {
            "name": "owner/model",
            "quantization": bits,
            "quantize_moe_experts": draw(st.booleans()) if bits != "none" else True,
            "dtype": draw(st.sampled_from(["bfloat16", "float32", "float16"])),
            **({"chat_template": template} if template else {}),
        },
        "method": method,
        "adapter": adapter,
        "data": data,
        "optim": optim,
        "run": {"seed": draw(st.integers(0, 99)), "save_steps": draw(st.integers(1, 500)), "save_total_limit": draw(st.integers(2, 9))},
    }  # fmt: skip


def there_and_back(config: RunConfig, tool: str) -> tuple[Ledger, Ledger | None]:
    """The ledger on the way there, and that of the way back where the tool can say everything."""
    there = export(config, tool, source="my.yaml", folder=HERE)
    if refused(there):
        return there, None
    return there, take_over(
        parse(there.text()), TOOLS[tool], out=HERE, method=config.method.kind if tool == "trl" else None
    )


def resolved(config: RunConfig) -> dict[str, Any]:
    found = {}
    for spec in fields_of(config):
        value = spec.value(config)
        if value == "auto" and spec in AUTO:
            value = AUTO[spec](config, Facts())[0]
        if isinstance(value, list) and value and isinstance(value[0], DataSource):
            value = [entry.model_dump() for entry in value]
        found[spec.path] = value
    return found


def assert_same_meaning(config: RunConfig, there: Ledger, back: Ledger) -> None:
    reading = read(back.mapping)
    before, after = resolved(config), resolved(reading.config)
    # A change is named on the way; what it names says something else, and so may its neighbours in that setting.
    named = {row.key for row in there.rows if row.outcome == "changed"}
    named |= {path for row in back.rows if row.outcome == "changed" for path in row.settings}
    named |= {"data.train"} if any(path.startswith("data.train") for path in named) else set()
    for path, value in before.items():
        if path.partition(".")[0] in LEARNED and path not in named and path != "model.attention":
            assert after.get(path) == value, path
    for path in (
        "run.seed",
        "run.save_steps",
        "run.save_total_limit",
        "optim.learning_rate",
        "method.kind",
        "model.name",
    ):
        assert after.get(path) == before[path], path
    assert after["data.train"][0]["path"] == before["data.train"][0]["path"]


@pytest.mark.parametrize("tool", TARGETS)
def test_a_config_there_and_back_means_the_same_or_what_is_missing_is_named(tool: str) -> None:
    passed = {"there": 0, "refused": 0}

    @settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(configs(tool))
    def each(mapping: dict[str, Any]) -> None:
        config = read(mapping).config
        there, back = there_and_back(config, tool)
        if back is None:
            passed["refused"] += 1
            assert all(row.reason for row in refused(there))
            return
        passed["there"] += 1
        assert_same_meaning(config, there, back)

    each()
    assert passed["there"] >= 10, passed
    assert passed["refused"] >= 5, passed


@pytest.mark.parametrize(
    ("tool", "change", "key"),
    [
        ("axolotl", {"method": {"kind": "embedding"}}, "method.kind"),
        ("axolotl", {"data": {"train": [{"path": "a/b"}]}}, "data.train"),
        ("axolotl", {"data": {"train": [{"path": "a/b", "format": "alpaca"}]}}, "data.train"),
        ("axolotl", {"optim": {"optim": "dion"}}, "optim.optim"),
        (
            "axolotl",
            {"model": {"name": "a/b", "quantization": "fp8"}, "adapter": {"kind": "lora"}},
            "model.quantization",
        ),
        *(
            (
                tool,
                {"model": {"name": "a/b", "quantization": "mxfp4"}, "adapter": {"kind": "lora"}},
                "model.quantization",
            )
            for tool in ("axolotl", "trl")
        ),
        ("axolotl", {"data": {"train": [{"path": "a/b", "format": "messages", "weight": 2.0}]}}, "data.train"),
        ("trl", {"method": {"kind": "simpo"}}, "method.kind"),
        (
            "trl",
            {"data": {"train": [{"path": "a/b", "format": "messages", "columns": {"messages": "talk"}}]}},
            "data.train",
        ),
        (
            "trl",
            {"data": {"train": [{"path": "a/b", "format": "messages"}], "trained_turns": "last"}},
            "data.trained_turns",
        ),
        ("trl", {"data": {"train": [{"path": "a/b", "format": "messages"}], "packing": True}}, "data.packing"),
        ("trl", {"method": {"kind": "grpo", "reward_funcs": ["gsm8k"]}}, "method.reward_funcs"),
        ("trl", {"model": {"name": "a/b", "tokenizer": "a/c"}}, "model.tokenizer"),
    ],
)
def test_what_a_tool_cannot_say_is_refused_by_name(tool: str, change: dict[str, Any], key: str) -> None:
    plain = {"model": {"name": "a/b"}, "data": {"train": [{"path": "a/b", "format": "messages"}]}}
    config = read({**plain, **change}).config
    missing = refused(export(config, tool, source="my.yaml", folder=HERE))
    assert key in {row.key for row in missing}
    assert all(row.reason for row in missing)


def test_settings_that_change_nothing_of_what_is_learned_are_left_out_and_said() -> None:
    config = read(
        {"model": {"name": "a/b"}, "data": {"train": [{"path": "a/b", "format": "messages"}]}, "memory": {"fp32_norms": True}, "run": {"prompts": ["Hi"]}}
    ).config  # fmt: skip
    ledger = export(config, "axolotl", source="my.yaml", folder=HERE)
    assert refused(ledger) == []
    assert {row.key for row in ledger.of("unsupported")} == {"memory.fp32_norms", "run.prompts"}
    assert "memory.fp32_norms" in ledger.text()


def test_what_was_seen_in_the_rows_counts_as_their_format() -> None:
    config = read({"model": {"name": "a/b"}, "data": {"train": [{"path": "rows.jsonl"}]}}).config
    assert [row.key for row in refused(export(config, "trl", source="m", folder=HERE))] == [
        "data.train",
        "data.trained_turns",
    ][:1]
    seen = export(config, "trl", source="m", folder=HERE, formats={"rows.jsonl": "messages"})
    assert refused(seen) == []
    assert parse(as_yaml(seen.mapping)).mapping["datasets"] == [{"path": "json", "data_files": "rows.jsonl"}]


def test_times_in_an_epoch_and_first_rows_and_a_place_below_are_written_as_trl_counts_them(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    source = {"path": "rows", "format": "messages", "rows": 50}
    mapping: dict[str, Any] = {
        "model": {"name": "a/b"},
        "adapter": {"kind": "lora"},
        "data": {"train": [source], "trained_turns": "all"},
        "optim": {"num_train_epochs": 4, "optim": "adamw_torch", "optim_args": {"amsgrad": True, "foreach": False}},
        "run": {"saves_per_epoch": 2},
    }
    given = export(read(mapping).config, "trl", source="my.yaml", folder=tmp_path, out=tmp_path / "theirs").mapping
    assert given["save_steps"] == 1 / 8, "a share of all steps"
    assert given["datasets"] == [{"path": "../rows", "split": "train[:50]"}]
    assert given["optim_args"] == "amsgrad=True,foreach=False"
    assert given["completion_only_loss"] is False


def test_an_adapter_in_float32_is_trls_own_but_beside_weights_of_few_bits() -> None:
    plain = {"model": {"name": "a/b"}, "data": {"train": [{"path": "a/b", "format": "messages"}]}}
    for quantization, usual in (("none", True), ("nf4", False)):
        for float32 in (True, False):
            model = {"name": "a/b", "quantization": quantization}
            adapter = {"kind": "lora", "autocast_adapter_dtype": float32}
            ledger = export(read({**plain, "model": model, "adapter": adapter}).config, "trl", source="m", folder=HERE)
            (row,) = (each for each in ledger.rows if each.key == "adapter.autocast_adapter_dtype")
            assert row.outcome == ("needless" if float32 is usual else "changed")


def test_a_subset_is_that_of_the_held_out_rows_too() -> None:
    text = "model_name_or_path: a/b\ndataset_name: me/rows\ndataset_config: main\nmax_steps: 9\noutput_dir: out\n"
    taken = take_over(parse(text + "eval_strategy: steps\n"), TOOLS["trl"], out=HERE)
    data = read(parse(taken.text()).mapping).config.data
    assert (data.train[0].subset, data.eval[0].subset, data.eval[0].split) == ("main", "main", "test")
    assert "eval" not in take_over(parse(text), TOOLS["trl"], out=HERE).mapping["data"]

    def refused_with(subset: str) -> list[str]:
        rows = [{"path": "a/b", "subset": name, "split": split, "format": "messages"} for name, split in (("main", "train"), (subset, "test"))]  # fmt: skip
        data = {"train": rows[:1], "eval": rows[1:]}
        return [row.key for row in refused(export(read({"model": {"name": "a/b"}, "data": data}).config, "trl", source="m", folder=HERE))]  # fmt: skip

    assert refused_with("main") == []
    assert refused_with("other") == ["data.eval"]


def test_what_is_a_switch_there_is_written_as_one() -> None:
    config = read({"model": {"name": "a/b"}, "data": {"train": [{"path": "a.jsonl"}], "deduplicate": "exact"}}).config
    there = export(config, "axolotl", source="my.yaml", folder=HERE).mapping
    assert there["dataset_exact_deduplication"] is True
