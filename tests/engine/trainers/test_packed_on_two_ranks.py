"""Bases that others packed, under data parallelism: two processes learn what one would, each with numbers of its own files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.builtin import tiny
from tests.caches import own_cache
from tests.engine.models.stored_packed.packed_files import packed_folders
from tests.engine.trainers.conftest import CONVERSATIONS, lines
from tests.engine.trainers.test_fsdp2 import LORA, Place, alike, weights
from tests.engine.trainers.test_fsdp2_mixtures import ON_EXPERTS, mixture
from tests.engine.trainers.two_ranks import TwoRanks, run_folder

SHORT = {"optim.max_steps": 4, "run.save_steps": 2}
TWO = {"run.devices": 2, "optim.per_device_train_batch_size": 2}
ALONE = {"optim.per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("packed")
    with TwoRanks(own_cache(root / "cache")) as two:
        yield Place(root, two)


@pytest.mark.parametrize("kind", ["gptq", pytest.param("packed", marks=pytest.mark.slow), "experts"])
def test_two_processes_learn_what_one_would(place: Place, kind: str) -> None:
    where = place.root / kind
    where.mkdir()
    experts = kind == "experts"
    plain = mixture(place, "qwen3_moe") if experts else tiny.folder()
    told = {"ordered": True} if kind == "gptq" else {"symmetric": False, "group": 16}
    packed, _ = packed_folders(plain, where, "gptq" if kind == "gptq" else "packed", **told)
    given = {**SHORT, **(ON_EXPERTS if experts else LORA), "model.name": str(packed)}
    given["data.train"] = place.rows(CONVERSATIONS)
    shared = place.two.train(run_folder(place.root / "runs", given | TWO))
    alone = place.two.train_alone(run_folder(place.root / "runs", given | ALONE))
    alike(shared, alone)
    for run in (shared, alone):
        entry = next(each for each in lines(run, "receipt")[-1]["entries"] if each["feature"] == "stored weights")
        assert entry["effective"] == "uint4"
    same = place.two.train(place.again(shared))
    assert all(torch.equal(value, weights(same)[name]) for name, value in weights(shared).items())
