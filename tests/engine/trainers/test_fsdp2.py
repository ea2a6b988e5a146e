"""FSDP2 on two processes takes the steps of one at the same global batch, and its checkpoints go on anywhere."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoModelForCausalLM, TrainingArguments
from trl import SFTTrainer

from engine import worker
from engine.builtin import tiny
from engine.config.files import as_yaml, parse
from engine.errors import ModelError
from engine.export import shards
from engine.export.__main__ import answer
from engine.export.places import Source
from engine.export.shards import put_together
from engine.model_files import SHARES, weight_files
from engine.rules import read
from engine.run import checkpoint
from engine.run.process import host
from engine.run.store import RunFolder
from engine.run.view import RANK_FIGURES
from engine.trainers import async_save, saving, sharded
from engine.trainers.arguments import sharding
from engine.trainers.async_save import AsyncSave
from engine.trainers.run_trainer import RunTrainer
from engine.trainers.saving import CheckpointWriter
from tests.caches import own_cache
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, RATED, STEPS, TAUGHT, TEXTS, lines, resumed_from
from tests.engine.trainers.test_grpo import GRPO
from tests.engine.trainers.two_ranks import TwoRanks, run_folder

SHORT = {"optim.max_steps": 4, "run.save_steps": 2, "optim.per_device_train_batch_size": 2}
HALF = {"run.devices": 2, "distributed.strategy": "fsdp2"}
ALONE = {"optim.per_device_train_batch_size": 4}
ONCE = {"optim.gradient_accumulation_steps": 1}
LORA = {"adapter.kind": "lora", "adapter.r": 4}
PROMPTED = {"run.prompts": ["What comes after 3?"], "run.prompts_steps": 2, "run.max_new_tokens": 8}
"""By itself a run of four steps answers five times, with up to 64 tokens: twice the time of its steps."""
READ = [{"text": f"After {number} comes {number + 1}, and then {number + 2}."} for number in range(48)]


PRETRAIN = {"method.kind": "pretrain"}


class Pair(NamedTuple):
    """A run of two processes with FSDP2, and the same of one."""

    shared: RunFolder
    alone: RunFolder


class Place:
    """Where the runs of this file are made; `alone` is trained here, `shared` by two processes."""

    def __init__(self, root: Path, two: TwoRanks) -> None:
        self.root, self.two = root, two

    def rows(self, rows: list[Any]) -> list[dict[str, str]]:
        path = self.root / f"rows-{len(list(self.root.glob('rows-*')))}.jsonl"
        path.write_text("".join(json.dumps(row if isinstance(row, dict) else {"messages": row}) + "\n" for row in rows))
        return [{"path": str(path)}]

    def both(self, rows: list[Any], settings: dict[str, Any], other: dict[str, Any] | None = None) -> Pair:
        """Both runs of a pair; `other` is trained by two processes as well, in the place of one."""
        given = {**SHORT, "data.train": self.rows(rows), **settings}
        shared = self.two.train(run_folder(self.root / "runs", given | HALF))
        beside = run_folder(self.root / "runs", given | (other or ALONE))
        return Pair(shared, self.two.train(beside) if other else self.two.train_alone(beside))

    def again(self, run: RunFolder, **settings: Any) -> RunFolder:
        """A copy that died right after its second step, with other settings."""
        copy = resumed_from(run, 2, self.root / "runs" / f"again-{len(list((self.root / 'runs').iterdir()))}")
        mapping = parse(copy.read_config()).mapping
        for path, value in settings.items():
            section, name = path.split(".", 1)
            mapping.setdefault(section, {})[name] = value
        copy.config.write_text(as_yaml(mapping))
        return copy


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("fsdp2")
    with TwoRanks(own_cache(root / "cache")) as two:
        yield Place(root, two)


@pytest.fixture(scope="module")
def full(place: Place) -> Pair:
    more = {**PROMPTED, "data.val_set_size": 8, "run.eval_steps": 2}
    more |= {"memory.gradient_checkpointing": True, "optim.gradient_accumulation_steps": 2}
    # Evaluations and samples leave layers together, too; a save and the next step find them so.
    more |= {"distributed.reshard_after_forward": False}
    return place.both(CONVERSATIONS, more)


@pytest.fixture(scope="module")
def lora(place: Place) -> Pair:
    return place.both(
        CONVERSATIONS, LORA | ONCE | {"model.dtype": "bfloat16", "distributed.reshard_after_forward": True}
    )


def curve(run: RunFolder, name: str = "loss", segment: int | None = None) -> dict[int, float]:
    return {event["step"]: event[name] for event in lines(run, "metrics", segment) if name in event}


def weights(run: RunFolder, step: int = 4) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, put together where they are in shares."""
    at = run.checkpoints / f"checkpoint-{step}"
    with put_together(Source(run, at, False), run.path / "whole") as source:
        files = [source.checkpoint / "adapter_model.safetensors"]
        files = files if files[0].exists() else weight_files(source.checkpoint)
        return {name: value for file in files for name, value in load_file(file).items()}


def alike(ours: RunFolder, theirs: RunFolder, tolerance: float = 1e-4) -> None:
    """Losses and weights are the same to rounding."""
    assert curve(ours).keys() == curve(theirs).keys() != set()
    for step, loss in curve(theirs).items():
        assert curve(ours)[step] == pytest.approx(loss, rel=tolerance, abs=1e-6), step
    first, second = weights(ours), weights(theirs)
    assert first.keys() == second.keys()
    for name, value in second.items():
        torch.testing.assert_close(
            first[name].float(),
            value.float(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda told, name=name: f"{name}: {told}",
        )


def strategy(run: RunFolder) -> dict[str, Any]:
    return next(entry for entry in lines(run, "receipt")[-1]["entries"] if entry["feature"] == "strategy")


def test_full_weights_learn_what_one_process_would(full: Pair) -> None:
    entry = strategy(full.shared)
    assert (entry["requested"], entry["effective"], entry["count"]) == ("fsdp2", "fsdp2", 46)
    assert entry["detail"] == (
        "of 46 weights are shares (DTensor); the first process holds 98,656 of 197,312 numbers; layers stay together between "
        "forward and backward pass"
    )
    alike(*full)
    assert curve(full.shared, "eval_loss") == pytest.approx(curve(full.alone, "eval_loss"), rel=1e-4)
    told = [[event["completion"] for event in lines(run, "sample")] for run in full]
    assert told[0] == told[1]
    assert told[0]


def test_each_rank_tells_its_figures_and_has_a_log(full: Pair) -> None:
    told = lines(full.shared, "ranks")
    assert told[-1]["step"] == 4
    assert {len(told[-1][name]) for name in RANK_FIGURES} == {2}
    assert all(value > 0 for name in RANK_FIGURES for value in told[-1][name])
    assert lines(full.alone, "ranks") == []
    assert curve(full.shared, "tokens") == curve(full.alone, "tokens"), (
        "all ranks' together are what one process counts"
    )
    assert "rank 1: process" in full.shared.log_of(1).read_text()
    assert not full.alone.log_of(1).exists()


def test_each_rank_writes_its_shares_and_a_reader_of_weights_says_what_they_are(full: Pair) -> None:
    at = full.shared.checkpoints / "checkpoint-4"
    assert checkpoint.problem_with(at, hashes=True) == ""
    held = []
    for file in sorted((at / SHARES).iterdir()):
        with safe_open(file, "pt") as shares:
            held.append(sum(shares.get_tensor(name).numel() for name in shares.keys()))  # noqa: SIM118
    assert held == [98_656, 98_656]
    with pytest.raises(ModelError, match="holds its weights in shares") as refused:
        weight_files(at)
    assert refused.value.hint == "`workbench merge RUN` makes one model folder of them."
    (at / SHARES / "shard-00002-model-00001-of-00001.safetensors").rename(at / "gone")
    assert "shard-00002" in checkpoint.problem_with(at)
    (at / "gone").rename(at / SHARES / "shard-00002-model-00001-of-00001.safetensors")


def test_merge_makes_one_folder_of_shares(place: Place, full: Pair) -> None:
    into = place.root / "merged"
    asked = {"do": "merge", "run": str(full.shared.path), "checkpoint": 4, "places": {"safetensors": str(into)}}
    (part,) = answer(asked, lambda **_: None, lambda *_: None)["parts"]
    assert part["ok"], part
    assert part["parity"]["weights"] == 46, "compared with the shares, read another way"
    merged = AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32).state_dict()
    for name, value in weights(full.alone).items():
        torch.testing.assert_close(merged[name], value, rtol=1e-4, atol=1e-4, msg=name)
    assert {path.name for path in place.root.iterdir() if path.name.startswith(".")} == set()


@pytest.mark.parametrize("wrong", ["a number", "two swapped"])
def test_a_dense_model_that_was_put_together_wrongly_is_not_kept(
    place: Place, full: Pair, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """Its logits are compared with the folder's own: only the shares tell what was trained."""
    put_together = shards._weights

    def wrongly(*given: Any) -> None:
        put_together(*given)
        (file,) = weight_files(given[1])
        made = load_file(file)
        one, other = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
        if wrong == "a number":
            made[one][0, 0] += 0.5
        else:
            made[one], made[other] = made[other], made[one]
        save_file(made, file, {"format": "pt"})

    monkeypatch.setattr(shards, "_weights", wrongly)
    into = place.root / "wrong"
    asked = {"do": "merge", "run": str(full.shared.path), "checkpoint": 4, "places": {"safetensors": str(into)}}
    (part,) = answer(asked, lambda **_: None, lambda *_: None)["parts"]
    assert not part["ok"]
    assert "model.layers.1.mlp.gate_proj.weight is not as training wrote it" in part["error"]["message"]
    assert not into.exists()


@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_two_processes_go_on_to_the_bit(place: Place, kind: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(kind).shared
    again = place.two.train(place.again(run))
    assert curve(again, segment=1) == {step: loss for step, loss in curve(run).items() if step > 2}
    first, second = weights(again), weights(run)
    assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_other_numbers_of_processes_go_on_to_rounding(place: Place, kind: str, request: pytest.FixtureRequest) -> None:
    pair = request.getfixturevalue(kind)
    fewer = place.again(pair.shared, **ALONE, **{"run.devices": 1, "distributed.strategy": "auto"})
    place.two.train_alone(fewer)
    more = place.two.train(place.again(pair.alone, **SHORT, **HALF))
    for run in (fewer, more):
        assert sorted(curve(run, segment=1)) == [3, 4]
        alike(run, pair.alone, 1e-4 if kind == "full" else 2e-2)


def test_an_adapter_is_one_plain_folder(lora: Pair) -> None:
    assert strategy(lora.shared)["count"] == 102
    assert "together" not in strategy(lora.shared)["detail"], "as its setting says"
    at = [run.checkpoints / "checkpoint-4" for run in lora]
    names = [{path.name for path in each.iterdir() if path.name.startswith("adapter")} for each in at]
    assert names[0] == names[1] == {"adapter_config.json", "adapter_model.safetensors"}
    assert not (at[0] / SHARES).exists()
    alike(*lora, tolerance=2e-2)  # bfloat16


@pytest.mark.parametrize("first", [True, False])
def test_one_rank_alone_writes_the_files_of_an_adapter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: bool
) -> None:
    """Several would write, and read, each other's halves. All of them put the weights together."""
    asked: list[Any] = []

    def save(into: str, state_dict: dict[str, Any]) -> None:
        Path(into, "adapter_model.safetensors").touch()

    def whole(model: Any) -> dict[str, Any]:
        asked.append(model)
        return {}

    monkeypatch.setattr(saving, "is_divided", lambda model: False)
    monkeypatch.setattr(sharded, "is_sharded", lambda model: True)
    monkeypatch.setattr(sharded, "adapter_weights", whole)
    rank: Any = SimpleNamespace(model=PeftModel.__new__(PeftModel), args=SimpleNamespace(should_save=first), _save=save)
    RunTrainer.save_model(rank, str(tmp_path))
    assert len(asked) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_model.safetensors"] * first


@pytest.mark.parametrize("cut", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_adapter_beside_a_head_of_its_own_learns_what_one_process_would(place: Place, cut: bool) -> None:
    """The loss reads the head's weights without the head's own pass, which would put its shares together."""
    folder = place.root / "untied"
    if not folder.exists():
        shutil.copytree(tiny.folder(), folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.save_pretrained(folder)
    pair = place.both(CONVERSATIONS, LORA | ONCE | {"model.name": str(folder), "kernels.use_cut_ce": cut})
    assert strategy(pair.shared)["count"] == 103
    alike(*pair)


def test_shares_in_main_memory_are_asked_of_accelerate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU has no other memory: what they do is shown on cards, by `benchmarks/context_parallel.py --parts sharded`."""
    asked = read({"run": {"devices": 2}, "distributed": {"strategy": "fsdp2", "cpu_offload": True}}).config
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = sharding(asked)
    monkeypatch.delenv("WORLD_SIZE")
    # Shares in main memory are measured by gloo, those that are put together travel by NCCL.
    assert given.pop("ddp_backend") == "cuda:nccl,cpu:gloo"
    plugin = TrainingArguments(str(tmp_path), use_cpu=True, **given).fsdp_plugin_args
    assert isinstance(FullyShardedDataParallelPlugin(**plugin).cpu_offload, CPUOffloadPolicy)


def test_steps_do_not_wait_for_a_checkpoint_of_shares(place: Place, full: Pair) -> None:
    """The copies are of the step that they are named by, though steps go on: two processes go on from them to the bit."""
    told = [event for event in lines(full.shared, "checkpoint") if event["state"] == "committed"]
    assert [event["step"] for event in told] == [2, 4]
    assert all(0 < event["waited"] < event["seconds"] for event in told)
    last = json.loads(full.shared.events.read_text("utf-8").splitlines()[-1])
    assert last["kind"] == "finished", "the end waits for the last one"


def test_a_rank_whose_disk_is_full_is_told_as_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's own exception is none that anybody catches."""
    full_disk = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "shard-00002"))

    def save(*_: Any, **__: Any) -> None:
        trace: Any = None
        raise CheckpointException("write", {0: (RuntimeError("no answer"), trace), 1: (full_disk, trace)})

    monkeypatch.setattr(sharded.dcp, "save", save)
    with pytest.raises(OSError, match="No space left") as raised:
        sharded._save({}, tmp_path / "weights")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, full_disk.filename)


def test_a_rank_that_cannot_make_its_folder_is_heard_by_all(tmp_path: Path) -> None:
    """By torch DCP's exchange of errors: the others would wait for it at a barrier else."""
    (tmp_path / "weights").write_text("no folder")
    with pytest.raises(sharded.RankDiskFailure, match="File exists") as raised:
        sharded._save({"a": torch.ones(2)}, tmp_path / "weights")
    assert raised.value.rank == 0


def test_what_goes_wrong_beside_the_training_is_raised_where_it_waits() -> None:
    late = AsyncSave(60)
    late._group = "one of its own"  # type: ignore[assignment]
    begun, done = threading.Event(), threading.Event()

    def write(_: Any) -> None:
        begun.set()
        assert done.wait(10)
        raise OSError(errno.ENOSPC, "full")

    late.begin(write)
    assert begun.wait(10)
    assert not late.failed
    done.set()
    with pytest.raises(OSError, match="full"):
        late.settle()
    assert not late.failed
    late.settle()


def test_a_copy_finds_the_room_that_was_made_for_it_before() -> None:
    late, state = AsyncSave(60), {"weight": torch.arange(6.0)}
    late.make_room(state)
    assert late._room is not None
    late._room.join(30)
    assert late._copies is not None
    room = late._copies["weight"].data_ptr()
    for _ in range(2):
        state["weight"] += 1
        copies = late.copy(state)
        assert copies["weight"].data_ptr() == room != state["weight"].data_ptr()
        assert torch.equal(copies["weight"], state["weight"])


def test_room_that_is_not_given_ahead_is_asked_for_again_by_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    late, state = AsyncSave(60), {"weight": torch.arange(6.0)}
    whole, asked = async_save.room_for, []

    def room_for(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        asked.append(given)
        if len(asked) == 1:
            raise MemoryError
        return whole(given)

    monkeypatch.setattr(async_save, "room_for", room_for)
    late.make_room(state)
    assert torch.equal(late.copy(state)["weight"], state["weight"])
    assert (len(asked), late.failed) == (2, False)


@pytest.mark.parametrize("sharded_out", [False, True])
def test_room_is_made_once_the_optimizer_has_states(monkeypatch: pytest.MonkeyPatch, sharded_out: bool) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    given = SimpleNamespace(args=SimpleNamespace(should_save=True, ddp_timeout=60), model=model, optimizer=optimizer)
    given.accelerator = SimpleNamespace(device=torch.device("cpu"))
    made = CheckpointWriter(given)  # type: ignore[arg-type]
    monkeypatch.setattr(sharded, "is_sharded", lambda _: sharded_out)
    monkeypatch.setattr(sharded, "states", lambda model, optimizer: dict(model.named_parameters()))
    monkeypatch.setattr(AsyncSave, "has_room", lambda *_: True)
    made.before_step()
    assert made._async_save is None
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    made.before_step()
    asked = made._async_save is not None and made._async_save._room is not None
    assert asked == sharded_out


class Broken(SimpleNamespace):
    """What of a trainer a save beside the training needs; its training fails."""

    def train(self, **_: Any) -> None:
        raise RuntimeError("no memory for the next step")


def writer(late: AsyncSave | None = None, first: bool = False) -> CheckpointWriter:
    made = CheckpointWriter(SimpleNamespace(args=SimpleNamespace(should_save=first)))  # type: ignore[arg-type]
    made._async_save = late
    return made


def begun(write: Callable[[Any], None]) -> AsyncSave:
    late = AsyncSave(60)
    late._group = "one of its own"  # type: ignore[assignment]
    late.begin(write)
    return late


def test_a_checkpoint_that_is_being_written_becomes_whole_though_the_training_fails(tmp_path: Path) -> None:
    go_on = threading.Event()

    def write(_: Any) -> None:
        assert go_on.wait(10)
        (tmp_path / "committed").touch()

    trainer = Broken(checkpoints=writer(begun(write)))
    features, prepared = SimpleNamespace(undo=lambda: None), SimpleNamespace(stream=None)
    threading.Timer(0.1, go_on.set).start()
    with pytest.raises(RuntimeError, match="next step"):
        worker._run_steps(trainer, features, prepared, None)  # type: ignore[arg-type]
    assert (tmp_path / "committed").exists()


def test_what_the_training_failed_by_is_told_where_the_save_fails_too() -> None:
    def write(_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    features, prepared = SimpleNamespace(undo=lambda: None), SimpleNamespace(stream=None)
    with pytest.raises(RuntimeError, match="next step"):
        worker._run_steps(Broken(checkpoints=writer(begun(write))), features, prepared, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [True, False])
def test_the_first_rank_is_the_one_that_ends_by_a_failed_save(first: bool) -> None:
    """Another one that left before it would be named as the cause, and a full disk by nobody."""

    def write(_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    late = begun(write)
    assert late._thread is not None
    late._thread.join()
    with pytest.raises(OSError, match="full") if first else contextlib.nullcontext():
        writer(late, first).raise_failed()
    assert late.failed is not first, "the others raise it where they wait for it"


def test_a_full_disk_is_told_though_another_rank_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gone(_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    def full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(torch.distributed, "barrier", gone)
    monkeypatch.setattr(sharded, "save_states", full_disk)
    with pytest.raises(OSError, match="full"):
        writer()._write_async(tmp_path, {}, None, 0.0, 0.0, None)
    monkeypatch.setattr(sharded, "save_states", lambda *_: None)
    with pytest.raises(RuntimeError, match="Connection closed"):
        writer()._write_async(tmp_path, {}, None, 0.0, 0.0, None)


def nan_on_the_second() -> None:
    """Has the loss of the second rank, and of no other, be no number from the third step on."""
    plain = SFTTrainer.compute_loss

    def compute_loss(self: SFTTrainer, *args: Any, **kwargs: Any) -> Any:
        loss = plain(self, *args, **kwargs)
        assert isinstance(loss, torch.Tensor)
        return loss * float("nan") if self.state.global_step >= 2 else loss

    if os.environ.get("RANK") == "1":
        SFTTrainer.compute_loss = compute_loss


@pytest.mark.slow
def test_a_loss_of_one_rank_that_is_no_number_ends_both_with_that_as_the_cause(tmp_path: Path) -> None:
    with TwoRanks(own_cache(tmp_path / "cache"), f"{__name__}:nan_on_the_second") as two:
        run = run_folder(tmp_path / "runs", SHORT | HALF | {"data.train": Place(tmp_path, two).rows(READ)} | PRETRAIN)
        ranks = two._lines[:2]
        for line in ranks:
            line.send(str(run.path))
        assert [line.recv() if line.poll(170) else None for line in ranks] == [1, 1]
    (ending,) = lines(run, "failed")
    assert (ending["cause"], ending["step"]) == ("diverged", 3)
    assert f"diverged at step 3: the loss of rank 1 on {host()} was not finite" in ending["message"]
    newest, skipped = checkpoint.newest_valid(run)
    assert newest is not None
    assert (newest.name, skipped) == ("checkpoint-2", [])


DDP = {"run.devices": 2, "distributed.strategy": "ddp"}
ASKED = CONVERSATIONS[:12]
KERNELS = {"kernels.fused_lora": True, "kernels.use_cut_ce": True, "memory.tiled_mlp": True}
MORE: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "pretrain": (READ, {"method.kind": "pretrain"}),
    "dpo": (PAIRS, {"method.kind": "dpo"}),
    "dpo lora": (PAIRS, {"method.kind": "dpo", **LORA}),
    "ipo": (PAIRS, {"method.kind": "ipo", **LORA}),
    "simpo": (PAIRS, {"method.kind": "simpo", "memory.gradient_checkpointing": "selective"}),
    "orpo": (PAIRS, {"method.kind": "orpo"}),
    "kto": (RATED, {"method.kind": "kto"}),
    "reward": (PAIRS, {"method.kind": "reward"}),
    "prm": (STEPS, {"method.kind": "prm"}),
    "distill": (TAUGHT, {"method.kind": "distill"}),
    "embedding": (TEXTS, {"method.kind": "embedding"}),
    "grpo": (ASKED, {**GRPO, "method.beta": 0.1}),
    # Of one token, one group a batch: at times a process has no answer that teaches, also where both are asked for old ones.
    "grpo with groups left out": (
        ASKED,
        {
            **GRPO, "method.reward_funcs": ["regex:[n-t]"], "method.max_completion_length": 1,
            "method.num_iterations": 2, "optim.per_device_train_batch_size": 4,
        },
    ),
    "gdpo lora": (ASKED, {**GRPO, **LORA, "method.kind": "gdpo"}),
    "reward lora": (PAIRS, {"method.kind": "reward", **LORA}),
    "qlora": (CONVERSATIONS, {**LORA, "model.quantization": "nf4", "optim.gradient_accumulation_steps": 2}),
    "qlora reward": (PAIRS, {**LORA, "model.quantization": "nf4", "method.kind": "reward"}),
    "qlora dpo with kernels": (PAIRS, {**LORA, **KERNELS, "model.quantization": "fp4", "method.kind": "dpo"}),
    "dpo with kernels": (PAIRS, {**LORA, **KERNELS, "method.kind": "dpo", "optim.gradient_accumulation_steps": 2}),
    "trained head and tiles": (CONVERSATIONS, {"kernels.use_cut_ce": True, "memory.tiled_mlp": True,
                               "memory.gradient_checkpointing": True, "optim.gradient_accumulation_steps": 2}),
    "norms in float32": (CONVERSATIONS, {**LORA, "memory.fp32_norms": True, "model.dtype": "bfloat16"}),
    "muon": (CONVERSATIONS, {"optim.optim": "muon"}),
}  # fmt: skip
BY_DDP = ("embedding", "grpo", "grpo with groups left out", "gdpo lora")
"""Whose answers are sampled, or whose texts are told apart, within a process: there it is the two processes of DDP."""
LEAVE_OUT = ("grpo with groups left out", "gdpo lora")
"""Which have groups whose answers earn the same, and no reference that they are held to."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_methods_learn_what_one_process_would(place: Place, name: str) -> None:
    rows, settings = MORE[name]
    pair = place.both(rows, settings, DDP if name in BY_DDP else None)
    entry = strategy(pair.shared)
    assert entry["effective"] == "fsdp2"
    assert entry["detail"].startswith(f"of {entry['count']} weights are shares (DTensor)"), "packed ones too"
    alike(*pair, tolerance=2e-2 if name == "norms in float32" else 1e-3)  # which is in bfloat16
    for metric in ("reward", "kl", "eval_loss", "frac_tokens_skipped"):
        assert curve(pair.shared, metric) == pytest.approx(curve(pair.alone, metric), rel=1e-3, abs=1e-6)
    assert any(map(abs, curve(pair.shared).values()))
    assert any(curve(pair.shared, "frac_tokens_skipped").values()) == (name in LEAVE_OUT)
