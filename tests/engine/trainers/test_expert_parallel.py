"""Experts that are divided over two processes, or four: they take the steps of one, and their checkpoints go on anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from engine.features.expert_parallel.dispatch import dispatch, dispatched, of_known_ids
from engine.features.fused_experts.apply import Block, fuse, is_fused
from engine.kernels.experts.module import experts_forward, gate_of
from engine.models.packed_experts import ExpertsAlone, _Experts
from engine.run import checkpoint
from engine.run.process import host
from engine.run.rollouts import read_group
from engine.run.store import RunFolder
from tests.caches import own_cache
from tests.engine.features.families import made, stored_in_mxfp4
from tests.engine.models.test_stored_fp8 import folders
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, RATED, STEPS, TAUGHT, TEXTS, lines
from tests.engine.trainers.test_fsdp2 import ONCE, PROMPTED, READ, Pair, Place, alike, curve, weights
from tests.engine.trainers.test_fsdp2_mixtures import LORA, ON_EXPERTS, mixture
from tests.engine.trainers.test_grpo import GRPO
from tests.engine.trainers.two_ranks import FourRanks, TwoRanks, run_folder

SPEC = "distributed.expert_parallel_size"
SHORT = {"optim.max_steps": 4, "run.save_steps": 2, "optim.per_device_train_batch_size": 2}
TWO = {"run.devices": 2, SPEC: 2}
ALONE = {"optim.per_device_train_batch_size": 4}


class Divided(Place):
    """Pairs whose first run divides experts over the processes."""

    def both(self, rows: list[Any], settings: dict[str, Any], other: dict[str, Any] | None = None) -> Pair:
        given = {**SHORT, "data.train": self.rows(rows), **settings}
        shared = self.two.train(run_folder(self.root / "runs", given | TWO))
        beside = run_folder(self.root / "runs", given | (other or ALONE))
        return Pair(shared, self.two.train(beside) if other else self.two.train_alone(beside))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Divided]:
    root = tmp_path_factory.mktemp("divided")
    with TwoRanks(own_cache(root / "cache")) as two:
        yield Divided(root, two)


@pytest.fixture(scope="module")
def lora(place: Divided) -> Pair:
    more = {**PROMPTED, "data.val_set_size": 8, "run.eval_steps": 2}
    more |= {"memory.gradient_checkpointing": True, "optim.gradient_accumulation_steps": 2}
    return place.both(CONVERSATIONS, {"model.name": mixture(place, "qwen3_moe"), **ON_EXPERTS, **more})


def entry(run: RunFolder, feature: str) -> dict[str, Any]:
    return next(each for each in lines(run, "receipt")[-1]["entries"] if each["feature"] == feature)


def test_adapters_on_experts_learn_what_one_process_would(lora: Pair) -> None:
    alike(*lora)
    for name in ("grad_norm", "eval_loss", "experts/entropy"):
        assert curve(lora.shared, name) == pytest.approx(curve(lora.alone, name), rel=1e-4), name
    samples = [[event["completion"] for event in lines(run, "sample")] for run in lora]
    assert samples[0] == samples[1] != []


def test_each_process_holds_half_of_the_experts(lora: Pair) -> None:
    """Two layers of four experts: 3 x 16 x 32 numbers each, and adapters of rank 4 on both weights of each."""
    numbers = 2 * 4 * (3 * 16 * 32 + 4 * (32 + 32) + 4 * (16 + 32))
    told = entry(lora.shared, "expert parallelism")
    assert (told["requested"], told["effective"], told["count"]) == (2, 2, 2)
    held = f"each process holds 2: {numbers * 4 // 2:,} bytes with what is trained on them, of {numbers * 4:,}"
    assert held in told["detail"]
    assert (
        entry(lora.shared, "trainable parameters")["effective"]
        == entry(lora.alone, "trainable parameters")["effective"]
    )


def test_a_checkpoint_of_adapters_is_that_of_one_process_and_goes_on_to_the_bit(place: Divided, lora: Pair) -> None:
    at = [run.checkpoints / "checkpoint-4" for run in lora]
    files = [{file.name for file in folder.iterdir()} for folder in at]
    assert files[0] - files[1] == {"rng_state_0.pth", "rng_state_1.pth"}
    states = [torch.load(folder / "optimizer.pt", weights_only=True)["state"] for folder in at]
    assert states[0].keys() == states[1].keys()
    for number, state in states[1].items():
        for key, value in state.items():
            torch.testing.assert_close(states[0][number][key], value, rtol=1e-3, atol=1e-6)
    same = place.two.train(place.again(lora.shared))
    assert curve(same, segment=1) == {step: loss for step, loss in curve(lora.shared).items() if step > 2}
    assert all(torch.equal(value, weights(same)[name]) for name, value in weights(lora.shared).items())


def test_a_checkpoint_in_shares_goes_on_with_divided_experts(place: Divided) -> None:
    """The other way is `test_checkpoints_go_on_elsewhere`."""
    given = {**SHORT, **ONCE, "data.train": place.rows(CONVERSATIONS), **ON_EXPERTS}
    given |= {"model.name": mixture(place, "qwen3_moe")}
    shares = place.two.train(
        run_folder(place.root / "runs", given | {"run.devices": 2, "distributed.strategy": "fsdp2"})
    )
    going_on = place.two.train(place.again(shares, **TWO, **{"distributed.strategy": "ddp"}))
    assert entry(going_on, "expert parallelism")["effective"] == 2
    assert sorted(curve(going_on, segment=1)) == [3, 4]
    alike(going_on, shares)


@pytest.fixture(scope="module")
def full(place: Divided) -> Pair:
    return place.both(
        CONVERSATIONS, {"model.name": mixture(place, "qwen3_moe"), "optim.gradient_accumulation_steps": 2}
    )


def test_full_weights_learn_what_one_process_would(full: Pair) -> None:
    """Put together from what each process wrote of its experts, without one that held all of them."""
    alike(*full, tolerance=1e-3)
    assert curve(full.shared, "grad_norm") == pytest.approx(curve(full.alone, "grad_norm"), rel=1e-4)
    numbers = [entry(run, "trainable parameters")["effective"] for run in full]
    assert numbers[0] == numbers[1] == sum(value.numel() for value in weights(full.alone).values())
    at = full.shared.checkpoints / "checkpoint-4"
    for folder, copies in (("weights", 1), ("optimizer", 2)):
        sizes = [file.stat().st_size for file in sorted((at / folder).glob("*.safetensors"))]
        experts = 2 * 3 * 4 * 16 * 32 * 4 * copies
        assert len(sizes) == 2
        assert min(sizes) >= experts // 2, "a process did not write its experts itself"


def test_full_weights_go_on_to_the_bit(place: Divided, full: Pair) -> None:
    same = place.two.train(place.again(full.shared))
    assert curve(same, segment=1) == {step: loss for step, loss in curve(full.shared).items() if step > 2}
    assert all(torch.equal(value, weights(same)[name]) for name, value in weights(full.shared).items())


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("lora", "divided"),
        ("lora", "shares"),
        ("full", "one process"),
        ("full", "shares"),
        # Adapters by one process: also `test_packed_experts_are_divided_as_they_are_read`.
        pytest.param("lora", "one process", marks=pytest.mark.slow),
        pytest.param("full", "divided", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_go_on_elsewhere(place: Divided, kind: str, where: str, request: pytest.FixtureRequest) -> None:
    """Of divided experts with one process and as FSDP2's shares; one process's with divided experts."""
    pair: Pair = request.getfixturevalue(kind)
    if where == "one process":
        run = place.two.train_alone(place.again(pair.shared, **ALONE, **{"run.devices": 1, SPEC: 1}))
    elif where == "divided":
        run = place.two.train(place.again(pair.alone, **SHORT, **TWO))
    else:
        run = place.two.train(place.again(pair.shared, **{SPEC: 1, "distributed.strategy": "fsdp2"}))
    assert sorted(curve(run, segment=1)) == [3, 4]
    alike(run, pair.alone, tolerance=1e-4 if kind == "lora" else 1e-3)


CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "experts with biases": ("gpt_oss", CONVERSATIONS, ON_EXPERTS),
    "plain experts, packed rows": (
        "mixtral", CONVERSATIONS, {**LORA, "data.packing": True, "data.max_length": 64, "model.dtype": "bfloat16"}
    ),
    "a shared expert, medium": ("qwen3_5_moe", CONVERSATIONS, {**ON_EXPERTS, "memory.gradient_checkpointing": "medium"}),
    "full weights with biases": ("gpt_oss", CONVERSATIONS, {}),
    "full weights, some frozen": (
        "mixtral", CONVERSATIONS, {"adapter.unfrozen_parameters": [r".*layers\.1\.", "lm_head"], "model.dtype": "bfloat16"}
    ),
    "pretrain": ("qwen3_moe", READ, {**ON_EXPERTS, "method.kind": "pretrain", "kernels.use_cut_ce": True}),
    "dpo": ("qwen3_moe", PAIRS, {**ON_EXPERTS, "method.kind": "dpo"}),
    "ipo": ("qwen3_moe", PAIRS, {**ON_EXPERTS, "method.kind": "ipo"}),
    "simpo": ("qwen3_moe", PAIRS, {**ON_EXPERTS, "method.kind": "simpo"}),
    "orpo": ("qwen3_moe", PAIRS, {**ON_EXPERTS, "method.kind": "orpo"}),
    "kto": ("qwen3_moe", RATED, {**ON_EXPERTS, "method.kind": "kto"}),
    "reward": ("qwen3_moe", PAIRS, {**ON_EXPERTS, "method.kind": "reward"}),
    "embedding": ("qwen3_moe", TEXTS, {**ON_EXPERTS, "method.kind": "embedding"}),
    "prm": ("qwen3_moe", STEPS, {**ON_EXPERTS, "method.kind": "prm"}),
    "distill": ("qwen3_moe", TAUGHT, {**ON_EXPERTS, "method.kind": "distill"}),
}  # fmt: skip
SAMPLED: dict[str, dict[str, Any]] = {
    "grpo": {"method.beta": 0.1, "method.num_iterations": 2},
    "grpo, a reference of its own": {"method.beta": 0.1, "method.reference": "copy"},
    "gdpo": {"method.kind": "gdpo", "optim.gradient_accumulation_steps": 2},
    "ppo": {"method.kind": "ppo", "memory.gradient_checkpointing": True},
}
BY_DEFAULT = ("experts with biases", "dpo")


@pytest.mark.parametrize(
    "name", [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_others_learn_what_one_process_would(place: Divided, name: str) -> None:
    family, rows, settings = CASES[name]
    # Texts are told apart within a process: there it is the two processes of DDP.
    other = {"run.devices": 2} if name == "embedding" else None
    pair = place.both(rows, {**ONCE, "model.name": mixture(place, family), **settings}, other)
    assert entry(pair.shared, "expert parallelism")["effective"] == 2
    alike(*pair, tolerance=2e-2 if settings.get("model.dtype") == "bfloat16" else 1e-3)
    assert curve(pair.shared, "grad_norm") == pytest.approx(curve(pair.alone, "grad_norm"), rel=2e-2)


def in_mxfp4(place: Divided) -> str:
    """A folder of a gpt-oss as it is published."""
    folder = place.root / "mxfp4"
    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(mixture(place, "qwen3_moe"))
        shape = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(tokenizer), "num_local_experts": 16}
        made("gpt_oss", max_position_embeddings=512, **shape).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        stored_in_mxfp4(folder)
    return str(folder)


def in_fp8(place: Divided) -> str:
    """A folder of a mixture whose layers and experts are stored in FP8."""
    if not (place.root / "stored" / "fp8").exists():
        folders(Path(mixture(place, "qwen3_moe")), place.root / "stored", [16, 16])
    return str(place.root / "stored" / "fp8")


PACKED: dict[str, tuple[Callable[[Divided], str], dict[str, Any], str, int]] = {
    "nf4": (partial(mixture, family="qwen3_moe"), {"model.quantization": "nf4"}, "nf4", 4),
    "int8": (partial(mixture, family="mixtral"), {"model.quantization": "int8"}, "int8", 4),
    "stored in mxfp4": (in_mxfp4, {}, "mxfp4", 16),
    "stored in fp8": (in_fp8, {}, "fp8", 4),
}
PACKED_BY_DEFAULT = ("nf4", "stored in mxfp4")
"""One kind that is packed while it is read, one that lies packed in the files."""


@pytest.mark.parametrize(
    "name", [name if name in PACKED_BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in PACKED]
)
def test_packed_experts_are_divided_as_they_are_read(place: Divided, name: str) -> None:
    folder, settings, kind, experts = PACKED[name]
    pair = place.both(CONVERSATIONS, {**ONCE, **ON_EXPERTS, "model.name": folder(place), **settings})
    alike(*pair, tolerance=1e-3)
    assert curve(pair.shared, "grad_norm") == pytest.approx(curve(pair.alone, "grad_norm"), rel=1e-3)
    told = [entry(run, "packed experts") for run in pair]
    assert [each["effective"] for each in told] == [kind, kind]
    assert [each["count"] for each in told] == [2 * experts // 2, 2 * experts]
    assert entry(pair.shared, "expert parallelism")["effective"] == 2
    more = place.again(pair.shared, **ALONE, **{"run.devices": 1, SPEC: 1})
    alike(place.two.train_alone(more), pair.alone, tolerance=1e-3)


def ending_early(place: Divided) -> str:
    """A folder of a mixture some of whose answers end at their first token and some not at all."""
    folder = place.root / "ending-early"
    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(mixture(place, "qwen3_moe"))
        model = made("qwen3_moe", vocab_size=len(tokenizer), max_position_embeddings=512)
        torch.manual_seed(0)
        with torch.no_grad():
            model.lm_head.weight[tokenizer.eos_token_id] = 1.5 * torch.randn(model.config.hidden_size)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def first_apart(pair: Pair) -> str:
    """By how much the two of a pair differ in each step, and how long they took: numbers that part before an answer does are
    another fault than an answer that was drawn otherwise."""
    told = [f"seconds {[lines(run, 'finished')[-1]['seconds'] for run in pair]}"]
    for figure in ("loss", "grad_norm", "kl", "entropy", "reward", "eval_loss"):
        ours, theirs = (curve(run, figure) for run in pair)
        told.append(f"{figure} {[(step, ours.get(step), value) for step, value in theirs.items()]}")
    for step in range(2, 5, 2):
        first, second = (weights(run, step) for run in pair)
        most = max(first, key=lambda name: float((first[name] - second[name]).abs().max()))
        told.append(f"weights of step {step} {float((first[most] - second[most]).abs().max()):.2g} in {most}")
    return "; ".join(told)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [name if name == "grpo" else pytest.param(name, marks=pytest.mark.slow) for name in SAMPLED]
)
def test_answers_are_those_that_processes_with_all_experts_sample(place: Divided, name: str) -> None:
    """Each process draws by a seed of its own, so it is compared with two of them, each of which holds all experts."""
    settings = {**GRPO, "optim.per_device_train_batch_size": 4, "optim.learning_rate": 1e-3, **ON_EXPERTS}
    settings |= {
        "model.name": ending_early(place),
        "method.rollout_groups": 8,
        "data.val_set_size": 4,
        "run.eval_steps": 2,
        # Most gradients of a first step are rounding: AdamW would make steps of full length of them, whatever their size.
        "optim.adam_epsilon": 1e-5,
    }
    pair = place.both(CONVERSATIONS[:12], settings | SAMPLED[name], {"run.devices": 2})
    groups = [[read_group(run, told) for told in lines(run, "rollout")] for run in pair]
    assert len(groups[0]) == len(groups[1]) > 0
    answers = [[each for group in side for each in group["completions"]] for side in groups]
    assert [each["text"] for each in answers[0]] == [each["text"] for each in answers[1]], first_apart(pair)
    for figure in ("advantage", "reward"):
        ours, theirs = ([each[figure] for each in side] for side in answers)
        assert ours == pytest.approx(theirs, abs=1e-4), first_apart(pair)
    assert len({each["tokens"] for each in answers[0]}) > 3, "no process was done before another"
    alike(*pair, tolerance=1e-3)
    for figure in ("grad_norm", "eval_loss", "eval_reward"):
        assert curve(pair.shared, figure) == pytest.approx(curve(pair.alone, figure), rel=1e-3, abs=1e-5), figure


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_four_processes_hold_them_in_groups(tmp_path: Path, size: int) -> None:
    """With 4 one expert each, so that some have no tokens at times; with 2 each expert lies on two processes."""
    with FourRanks(own_cache(tmp_path / "cache")) as four:
        place = Divided(tmp_path, four)
        given = {
            **SHORT,
            "data.train": place.rows(CONVERSATIONS),
            "model.name": mixture(place, "qwen3_moe"),
            **ON_EXPERTS,
        }
        given |= {"optim.per_device_train_batch_size": 1}
        shared = four.train(run_folder(tmp_path / "runs", {**given, "run.devices": 4, SPEC: size}))
        alone = four.train_alone(run_folder(tmp_path / "runs", given | ALONE))
        alike(shared, alone)
        assert curve(shared, "grad_norm") == pytest.approx(curve(alone, "grad_norm"), rel=1e-4)
        more = place.again(shared, **ALONE, **{"run.devices": 1, SPEC: 1})
        alike(four.train_alone(more), alone)


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_told_with_the_rank_whose_it_is(tmp_path: Path) -> None:
    """Its gradient reaches the experts of the other process through what they exchange; the losses do not."""
    with TwoRanks(own_cache(tmp_path / "cache"), "tests.engine.trainers.test_fsdp2:nan_on_the_second") as two:
        place = Divided(tmp_path, two)
        given = {**SHORT, **TWO, **ON_EXPERTS, "model.name": mixture(place, "qwen3_moe")}
        run = run_folder(tmp_path / "runs", given | {"data.train": place.rows(CONVERSATIONS)})
        for line in two._lines[:2]:
            line.send(str(run.path))
        assert [line.recv() if line.poll(170) else None for line in two._lines[:2]] == [1, 1]
    (ending,) = lines(run, "failed")
    assert (ending["cause"], ending["step"]) == ("diverged", 3)
    assert f"the loss of rank 1 on {host()} was not finite" in ending["message"]
    newest, skipped = checkpoint.newest_valid(run)
    assert newest is not None
    assert (newest.name, skipped) == ("checkpoint-2", [])


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def choice(tokens: int, experts: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    shares, ids = torch.rand(tokens, experts).topk(chosen, -1)
    return ids, (shares / shares.sum(-1, keepdim=True)).requires_grad_()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_what_is_sent_comes_back_with_all_gradients(group: dist.ProcessGroup, family: str) -> None:
    torch.manual_seed(0)
    (experts, *_) = [each for each in made(family).modules() if hasattr(each, "is_transposed")]
    count = experts.num_experts
    ids, shares = choice(17, count, 2)
    tokens = torch.randn(17, experts.down_proj.shape[2 if experts.is_transposed else 1], requires_grad=True)
    given = [tokens, shares, *experts.parameters()]
    expected = experts(tokens, ids, shares)
    theirs = torch.autograd.grad(expected.square().sum(), given)
    known = of_known_ids(experts.forward, count)
    ours = dispatch(known, tokens, ids, shares, held=count, size=1, group=group)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours.square().sum(), given), theirs)


def test_ids_of_no_expert_take_part_in_nothing() -> None:
    torch.manual_seed(0)
    (experts, *_) = [each for each in made("qwen3_moe").modules() if hasattr(each, "is_transposed")]
    ids, shares = choice(17, experts.num_experts, 2)
    tokens = torch.randn(17, experts.down_proj.shape[1])
    # Two processes, each with its experts: the sum of both is the whole.
    parts = []
    for ours in (ids < 2, ids >= 2):
        some = torch.where(ours, ids, experts.num_experts)
        parts.append(of_known_ids(experts.forward, experts.num_experts)(tokens, some, shares))
    torch.testing.assert_close(parts[0] + parts[1], experts(tokens, ids, shares))
    assert not torch.allclose(parts[0], parts[1])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_fused_pass_leaves_ids_of_no_expert_out_itself(family: str) -> None:
    """So that it is asked as it is, where other passes see known ids alone (`is_fused`)."""
    torch.manual_seed(0)
    (experts, *_) = [each for each in made(family).modules() if hasattr(each, "is_transposed")]
    block, gate = Block(experts, ()), gate_of(experts)
    assert not is_fused(block)
    ids, shares = choice(17, experts.num_experts, 2)
    ids = torch.where(ids < 2, ids, experts.num_experts)
    tokens = torch.randn(17, experts.down_proj.shape[2 if experts.is_transposed else 1], requires_grad=True)
    given = [tokens, shares, *experts.parameters()]
    expected = of_known_ids(experts.forward, experts.num_experts)(tokens, ids, shares)
    ours = experts_forward(experts, tokens, ids, shares, gate=gate)
    torch.testing.assert_close(ours, expected)
    theirs = torch.autograd.grad(expected.square().sum(), given)
    torch.testing.assert_close(torch.autograd.grad(ours.square().sum(), given), theirs)
    undo = fuse([block])
    assert is_fused(block)
    torch.testing.assert_close(experts(tokens, ids, shares), expected)
    undo()
    assert not is_fused(block)


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    (experts, *_) = [each for each in made("qwen3_moe").modules() if hasattr(each, "is_transposed")]
    tokens = torch.randn(0, experts.down_proj.shape[1], requires_grad=True)
    ids, shares = choice(0, experts.num_experts, 2)
    known = of_known_ids(experts.forward, experts.num_experts)
    out = dispatched(known, tokens, ids, shares, experts.num_experts)
    assert out.shape == tokens.shape
    found = torch.autograd.grad(out.sum(), [tokens, shares, *experts.parameters()])
    assert all(not gradient.any() for gradient in found)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe"])
def test_experts_of_others_are_left_in_the_files(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(family)
    model.save_pretrained(tmp_path)
    read: list[int] = []
    count = model.config.get_text_config()
    experts = getattr(count, "num_experts", None) or count.num_local_experts
    one = _Experts.__init__

    def counted(self: Any, count: int, each: Any) -> None:
        one(self, count, lambda number: read.append(number) or each(number))

    monkeypatch.setattr(_Experts, "__init__", counted)
    for place in (0, 1):
        read.clear()
        part = type(model).from_pretrained(tmp_path, quantization_config=ExpertsAlone("divide", part=(place, 2)))
        held = experts // 2
        assert set(read) == set(range(place * held, place * held + held))
        for name, weight in part.state_dict().items():
            whole = model.state_dict()[name]
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                whole = whole[place * held : place * held + held]
            assert torch.equal(weight, whole), name
        assert not getattr(part, "is_quantized", False)
