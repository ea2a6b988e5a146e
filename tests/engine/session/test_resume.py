"""A run whose config was changed for fewer devices is refused before launch where it no longer fits, and stays as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.files import as_yaml
from engine.errors import UsageError, WorkbenchError
from engine.hardware import parse_machine
from engine.run import checkpoint, launch
from engine.run.store import RunFolder, create
from engine.session import resume as resuming

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of eight cards, stopped; the machine has eight."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    mapping: dict[str, Any] = {
        "version": 1,
        "model": {"name": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": [{"path": str(tmp_path / "rows.jsonl")}], "max_length": 1024},
        "optim": {"per_device_train_batch_size": 1, "max_steps": 100},
        "run": {"devices": 8},
        "distributed": {"strategy": "fsdp2"},
    }
    machine = parse_machine("8xH100-80GB")
    monkeypatch.setattr("engine.data.gather_facts.this_machine", lambda folder: machine)
    made = create(tmp_path / "runs", as_yaml(mapping), {"method": "sft", "model": "model"})
    made.update_json(state="stopped", config=made.read_config())
    return made


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(launch, "resume", lambda run, **_: (found.append(run.read_config()), (None, []))[1])
    return found


FEWER = {"run.devices": 1, "distributed.strategy": "auto"}


def test_fewer_devices_that_do_not_hold_it_are_refused_and_nothing_is_lost(run: RunFolder, resumed: list[str]) -> None:
    before = run.config.read_bytes()
    with pytest.raises(
        WorkbenchError, match=r"cannot go on so: .*this will not fit: needs .* GiB, the card has 78\.8 GiB"
    ):
        resuming.resume(run, settings=FEWER)
    assert (run.config.read_bytes(), run.state, resumed) == (before, "stopped", [])


def test_a_config_that_a_person_changed_is_judged_alike(run: RunFolder, resumed: list[str]) -> None:
    run.config.write_text(run.read_config().replace("devices: 8", "devices: 1").replace("fsdp2", "auto"))
    with pytest.raises(WorkbenchError, match="this will not fit"):
        resuming.resume(run)
    assert resumed == []


def test_what_fits_goes_on_and_what_was_not_changed_is_not_judged_again(
    run: RunFolder, resumed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resuming.resume(run, settings={"run.devices": 4, "optim.gradient_accumulation_steps": 2})
    assert "devices: 4" in resumed[0]
    run.update_json(config=run.read_config(), state="stopped")
    monkeypatch.setattr("engine.data.gather_facts.gather_facts", None)
    resuming.resume(run)
    assert len(resumed) == 2


def test_layers_that_were_kept_together_for_other_cards_are_chosen_for_these(
    run: RunFolder, resumed: list[str]
) -> None:
    """On eight cards there was room; on fewer there is less, and with ddp it would be refused."""
    run.config.write_text(run.read_config() + "  reshard_after_forward: false\n")
    run.update_json(config=run.read_config(), auto={"distributed.reshard_after_forward": {"value": False}})
    resuming.resume(run, settings={"run.devices": 4})
    assert "reshard_after_forward: auto" in resumed[0]
    run.update_json(auto={})
    resuming.resume(run, settings={"distributed.reshard_after_forward": False})
    assert "reshard_after_forward: false" in resumed[1], "what was asked for stays"
    run.update_json(auto={"distributed.reshard_after_forward": {"value": True}})
    resuming.resume(run, settings={"run.devices": 4})
    assert "reshard_after_forward: false" in resumed[2], "also where it had been chosen before"


def test_a_job_of_a_cluster_is_not_judged_by_this_machine(run: RunFolder, resumed: list[str]) -> None:
    run.update_json(cluster="slurm")
    resuming.resume(run, settings=FEWER)
    assert "devices: 1" in resumed[0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"adapter.r": 8}, "adapter.r: must stay 16, which checkpoint-4 was trained with; got 8."),
        ({"adapter.bias": "all"}, "adapter.bias: must stay none, which checkpoint-4 was trained with; got all."),
        (
            {"adapter.loraplus_lr_ratio": 16.0, "distributed.strategy": "ddp"},
            "adapter.loraplus_lr_ratio: must stay nothing, as the optimizer's states are in one group of weights or in two; got 16.",
        ),
        ({"adapter": {"kind": "none"}}, "adapter.kind: must stay lora, which checkpoint-4 was trained with; got none."),
    ],
)
def test_another_adapter_than_the_checkpoints_is_refused_before_it_starts(
    run: RunFolder, resumed: list[str], settings: dict[str, Any], sentence: str
) -> None:
    run.config.write_text(run.read_config() + "adapter: {kind: lora, r: 16}\n")
    run.update_json(config=run.read_config())
    before = run.read_config()
    tmp = checkpoint.begin(run, 4)
    (tmp / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16, "use_dora": false, "bias": "none"}')
    checkpoint.commit(tmp, {"step": 4})
    with pytest.raises(UsageError) as refused:
        resuming.resume(run, settings=settings)
    assert refused.value.message == f"run {run.id} cannot go on so: {sentence}"
    assert (run.read_config(), resumed) == (before, [])
    resuming.resume(run, settings={"adapter.lora_alpha": 8})
    assert "lora_alpha: 8" in resumed[0]
