"""A run whose config was changed for fewer devices is refused before launch where it no longer fits, and stays as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.files import as_yaml, parse, put
from engine.errors import UsageError, WorkbenchError
from engine.hardware import parse_machine
from engine.run import checkpoint, data_record, launch
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


def test_what_followed_from_a_setting_that_is_changed_follows_again(run: RunFolder, resumed: list[str]) -> None:
    """Answers that teach nothing were left out by themselves; beside a reference they teach, and `true` would be refused."""
    method = "method: {kind: grpo, beta: 0, reward_funcs: ['length:64'], skip_zero_advantage: true}\n"
    run.config.write_text(run.read_config().replace("  max_length: 1024\n", "") + method)
    run.update_json(config=run.read_config(), auto={"method.skip_zero_advantage": {"value": True}})
    settings = {"method.beta": 0.1, "run.devices": 4}
    resuming.resume(run, settings=settings)
    assert "skip_zero_advantage: auto" in resumed[0]
    told = run.read_json()["auto"]["method.skip_zero_advantage"]
    assert (told["value"], told["reason"][:11]) == (False, "method.beta")
    run.update_json(auto={})
    run.config.write_text(run.read_config().replace("skip_zero_advantage: auto", "skip_zero_advantage: true"))
    with pytest.raises(UsageError, match=r"method\.skip_zero_advantage: must be"):
        resuming.resume(run, settings=settings)


def test_a_choice_of_the_launch_has_the_reason_that_holds_now(run: RunFolder, resumed: list[str]) -> None:
    mapping: dict[str, Any] = parse(run.read_config()).mapping
    mapping["method"] = {"kind": "grpo", "beta": 0, "reward_funcs": ["length:64"], "reference": "adapter_off"}
    mapping["optim"]["per_device_eval_batch_size"] = 2
    mapping |= {"adapter": {"kind": "lora"}, "run": {"devices": 1, "eval_steps": 10}, "distributed": {}}
    mapping["method"]["num_generations"] = 2
    mapping["data"] = {"train": mapping["data"]["train"], "val_set_size": 1}
    run.config.write_text(as_yaml(mapping))
    auto = {
        "method.reference": {"value": "adapter_off", "reason": "no reference is kept while method.beta is 0"},
        "run.eval_steps": {"value": 10, "reason": "ten times in 100 steps"},
        "optim.tf32": {"value": False, "reason": "there was no GPU"},
    }
    run.update_json(config=run.read_config(), auto=auto)
    resuming.resume(run, settings={"method.beta": 0.1})
    told = run.read_json()["auto"]
    assert told["method.reference"]["value"] == "adapter_off"
    assert told["method.reference"]["reason"] == "the model without its adapter is the reference and costs no memory"
    assert {**told, "method.reference": None} == {**auto, "method.reference": None}, "nothing that they follow from"
    run.update_json(config=run.read_config(), state="stopped")
    resuming.resume(run, settings={"optim.max_steps": 300})
    told = run.read_json()["auto"]
    assert told["run.eval_steps"]["value"] == 10, "what it has gone by so far"
    assert (
        told["run.eval_steps"]["reason"]
        == "kept from the launch (ten times in 100 steps); optim.max_steps changed since"
    )


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize(("name", "path"), [("rows.jsonl", "data.train.0.path"), ("model", "model.name")])
def test_what_is_gone_is_named_with_the_way_to_where_it_is_now(
    run: RunFolder, resumed: list[str], name: str, path: str, accepted: bool
) -> None:
    place = run.path.parents[1] / name
    place.rename(place.with_name("moved"))
    before = run.read_config()
    for settings in ({}, {"run.logging_steps": 2}):
        with pytest.raises(UsageError, match=rf"{path}: must be a f.* that exists; got {place}") as told:
            resuming.resume(run, settings=settings, accept_data=accepted)
        assert f"`workbench resume {run.path} {path}=...`" in told.value.hint
    assert (run.read_config(), resumed) == (before, [])
    resuming.resume(run, settings={path: str(place.with_name("moved"))}, accept_data=accepted)
    assert len(resumed) == 1


def test_a_job_of_a_cluster_is_not_judged_by_this_machine(run: RunFolder, resumed: list[str]) -> None:
    run.update_json(cluster="slurm")
    resuming.resume(run, settings=FEWER)
    assert "devices: 1" in resumed[0]


@pytest.mark.parametrize(
    ("settings", "was", "given"),
    [
        ({"method.kind": "pretrain"}, "sft", "pretrain"),
        ({"adapter.r": 8}, 16, 8),
        ({"adapter.lora_alpha": 64}, 32, 64),
        ({"adapter.use_rslora": True}, "false", "true"),
        ({"adapter.bias": "all"}, "none", "all"),
        ({"adapter.loraplus_lr_ratio": 16.0}, "nothing", "16"),
        ({"adapter": {"kind": "none"}}, "lora", "none"),
        ({"adapter.target_modules": ["q_proj"]}, "all-linear", "[q_proj]"),
        ({"adapter.modules_to_save": ["lm_head"]}, "[]", "[lm_head]"),
        ({"model.train_vision": "none"}, "all", "none"),
        ({"optim.optim": "adafactor"}, "adamw_torch", "adafactor"),
        ({"data.packing": True}, "false", "true"),
        ({"run.seed": 7}, 42, 7),
        ({"model.name": "foo"}, "{model}", "foo"),
        ({"model.revision": "v2"}, "nothing", "v2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_make_another_model_of_it_is_refused_before_it_starts(
    run: RunFolder, resumed: list[str], tmp_path: Path, settings: dict[str, Any], was: object, given: object
) -> None:
    run.config.write_text(run.read_config() + "adapter: {kind: lora, r: 16}\n")
    text = run.read_config().replace("max_steps: 100", "max_steps: 100\n  optim: adamw_torch")
    text = text.replace(str(tmp_path / "model"), "org/model") if "model.revision" in settings else text
    run.config.write_text(text)
    run.update_json(config=text)
    tmp = checkpoint.begin(run, 4)
    (tmp / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16, "use_dora": false, "bias": "none"}')
    checkpoint.commit(tmp, {"step": 4})
    path = "adapter.kind" if "adapter" in settings else next(iter(settings))
    before = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    with pytest.raises(UsageError) as refused:
        resuming.resume(run, settings=settings)
    stays = str(was).format(model=tmp_path / "model")
    verb = "from" if path in ("model.name", "model.revision") else "with"
    sentence = f"{path}: must stay {stays}, which checkpoint-4 was trained {verb}; got {given}."
    assert refused.value.message == f"run {run.id} cannot go on so: {sentence}"
    assert refused.value.hint.startswith(f"Leave it at {stays}")
    assert {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()} == before
    # Who wrote it into the file is told the same.
    mapping = parse(text).mapping
    for path, value in settings.items():
        put(mapping, path, value)
    run.config.write_text(as_yaml(mapping))
    with pytest.raises(UsageError, match="must stay"):
        resuming.resume(run)
    assert resumed == []


def test_what_makes_the_same_model_goes_on(run: RunFolder, resumed: list[str], tmp_path: Path) -> None:
    text = run.read_config().replace("max_steps: 100", "max_steps: 100\n  optim: adamw_torch")
    run.config.write_text(text)
    run.update_json(config=text)
    tmp = checkpoint.begin(run, 4)
    (tmp / "config.json").write_text(json.dumps(SHAPE))
    checkpoint.commit(tmp, {"step": 4})
    fused = {"optim.optim": "adamw_torch_fused", "optim.learning_rate": 1e-4, "optim.max_steps": 200}
    resuming.resume(run, settings=fused)
    resuming.resume(run, settings={"run.seed": 7, "data.packing": True, "data.ignore_data_skip": True})
    assert len(resumed) == 2
    run.config.write_text(text)
    (tmp_path / "model").rename(tmp_path / "moved")
    resuming.resume(run, settings={"model.name": str(tmp_path / "moved")})
    assert str(tmp_path / "moved") in resumed[2]
    run.config.write_text(text)
    (tmp_path / "moved/config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 28}))
    with pytest.raises(UsageError, match=r"model\.name: must stay .*model, which checkpoint-4 was trained from"):
        resuming.resume(run, settings={"model.name": str(tmp_path / "moved")})


def test_other_words_for_what_an_adapter_covers_go_on(run: RunFolder, resumed: list[str], tmp_path: Path) -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
    text = run.read_config() + "adapter: {kind: lora, r: 16, path: /first}\n"
    run.config.write_text(text)
    run.update_json(config=text)
    tmp = checkpoint.begin(run, 4)
    (tmp / "adapter_config.json").write_text(json.dumps({"r": 16, "target_modules": names[::-1]}))
    checkpoint.commit(tmp, {"step": 4})
    resuming.resume(run, settings={"adapter.target_modules": names, "adapter.path": "/moved"})
    run.update_json(config=run.read_config())
    resuming.resume(run, settings={"adapter.target_modules": names[::-1], "adapter.path": None})
    (tmp_path / "link").symlink_to(tmp_path / "model")
    resuming.resume(run, settings={"model.name": str(tmp_path / "link")})
    assert len(resumed) == 3
    with pytest.raises(UsageError, match=r"must stay a list of 5 with \[up_proj\], which .*; got \[q_proj"):
        resuming.resume(run, settings={"adapter.target_modules": names[:4]})
    run.update_json(config=run.read_config())
    with pytest.raises(
        UsageError, match="must stay nothing, since checkpoint-4 holds the adapter that it goes on with"
    ):
        resuming.resume(run, settings={"adapter.path": "/another"})


def test_rows_that_a_setting_makes_otherwise_are_compared_before_it_starts(
    run: RunFolder, resumed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files are as they were, and only the worker found out, which left a run that failed with a config that fails."""
    asked: list[dict[str, Any]] = []

    def ask(do: str, **params: Any) -> dict[str, Any]:
        asked.append(params["config"])
        return {"splits": {"train": {"sentence": "data.train: row 0 of 1 differs", "same": False}}}

    monkeypatch.setattr(resuming, "ask_once", ask)
    checkpoint.commit(checkpoint.begin(run, 4), {"step": 4})
    data_record.write(run, {})
    before = run.read_config()
    with pytest.raises(data_record.DataChanged, match="row 0 of 1 differs"):
        resuming.resume(run, settings={"data.max_length": 512})
    assert (asked[0]["data"]["max_length"], run.read_config(), resumed) == (512, before, [])
    resuming.resume(run, settings={"optim.learning_rate": 1e-4})
    assert (len(asked), len(resumed)) == (1, 1)
