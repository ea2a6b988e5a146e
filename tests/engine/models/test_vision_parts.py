"""`model.train_vision`: which parts of a model that sees learn, with adapters and without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.adapter import Lora, NoAdapter
from engine.config.facts import Facts
from engine.config.method import METHODS
from engine.config.model import Model
from engine.errors import ModelError
from engine.facts.counts import parameters
from engine.facts.model_shape import model_facts
from engine.models.adapters import add_adapter
from engine.planning.auto import resolved
from engine.rules import read
from tests.engine.seeing import BUILDERS
from tests.families.vision import FAMILIES, gemma4

WHERE = {
    "idefics3": ("vision_model", "connector"),
    "gemma3": ("vision_tower", "multi_modal_projector"),
    "gemma4_vl": ("vision_tower", "embed_vision"),
}


@pytest.fixture(scope="module")
def folders(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("seeing")
    builders = {**BUILDERS, "gemma4_vl": gemma4}
    return {name: build(shared_data / "tokenizers/minimind", base / name) for name, build in builders.items()}


@pytest.fixture(scope="module")
def more(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("more")
    names = ("pixtral", "mistral3", "lfm2_vl", "gemma4_vl")
    return {name: FAMILIES[name](shared_data / "tokenizers/minimind", base / name) for name in names}


def learning(folder: Path, trained: str, adapter: Any) -> set[str]:
    """The parts that hold a weight which learns."""
    from transformers import AutoModelForImageTextToText

    config: Any = SimpleNamespace(
        model=Model(name="test", train_vision=trained, dtype="float32"),
        adapter=adapter,
        method=METHODS["sft"].model_construct(),
    )
    model = add_adapter(AutoModelForImageTextToText.from_pretrained(folder), config)
    tower, projector = WHERE[folder.name]
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert names
    return {"tower" if tower in name else "projector" if projector in name else "language" for name in names}


@pytest.mark.parametrize("name", WHERE)
@pytest.mark.parametrize("kind", ["none", "lora"])
def test_the_parts_that_are_named_learn_and_no_other(folders: dict[str, Path], name: str, kind: str) -> None:
    adapter = NoAdapter() if kind == "none" else Lora(r=4, target_modules="all-linear")
    found = {trained: learning(folders[name], trained, adapter) for trained in ("none", "projector", "all")}
    # The projector of Gemma 3 has no linear layer for an adapter.
    joins = set() if (name, kind) == ("gemma3", "lora") else {"projector"}
    assert found == {
        "none": {"language"},
        "projector": {"language"} | joins,
        "all": {"language", "tower"} | joins,
    }


@pytest.mark.parametrize("family", ["pixtral", "mistral3", "lfm2_vl", "gemma4_vl"])
@pytest.mark.parametrize("trained", ["none", "projector", "all"])
def test_adapters_beside_all_that_learn_are_told_to_the_number(
    more: dict[str, Path], family: str, trained: str
) -> None:
    """Of families that torchvision alone reads: a linear layer of patches is one, and so is Gemma 4's projector."""
    from transformers import AutoModelForImageTextToText

    config = read({
        "version": 1, "model": {"name": str(more[family]), "dtype": "float32", "train_vision": trained},
        "adapter": {"kind": "lora", "r": 4}, "data": {"train": [{"path": "rows.jsonl"}]},
    }).config  # fmt: skip
    facts = Facts(model=model_facts(str(more[family])))
    told = parameters(resolved(config, facts), facts)
    assert told is not None
    model = add_adapter(AutoModelForImageTextToText.from_pretrained(more[family]), resolved(config, facts))
    assert told.trained == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def test_targets_that_stand_in_both_are_the_language_models_alone(folders: dict[str, Path]) -> None:
    adapter = Lora(r=4, target_modules=["q_proj", "v_proj"])
    assert learning(folders["idefics3"], "none", adapter) == {"language"}
    assert learning(folders["idefics3"], "all", adapter) == {"language", "tower"}


def test_a_model_of_text_has_no_parts_to_freeze() -> None:
    from transformers import AutoModelForCausalLM

    from engine.builtin import tiny

    config: Any = SimpleNamespace(model=Model(name="test", train_vision="none"), adapter=NoAdapter())
    with pytest.raises(ModelError, match="asks for a model with a vision tower, and this one has none"):
        add_adapter(AutoModelForCausalLM.from_pretrained(tiny.folder()), config)


def test_freezing_all_that_was_to_learn_is_refused(folders: dict[str, Path]) -> None:
    adapter = NoAdapter(unfrozen_parameters=[r".*vision_model"])
    with pytest.raises(ModelError, match="freezes every weight"):
        learning(folders["idefics3"], "none", adapter)


def test_a_processor_that_asks_for_torchvision_is_refused_with_the_way_out(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    from engine.models.load import load_processing_class

    def asks(*_: Any, **__: Any) -> Any:
        raise ImportError("PixtralImageProcessor requires the Torchvision library but it was not found")

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", asks)
    monkeypatch.setattr("engine.models.processors._class_of", lambda folder: "OfATransformersToCome")
    data = SimpleNamespace(image_backend="pil", min_pixels=None, max_pixels=None)
    config: Any = SimpleNamespace(model=Model(name=str(folders["idefics3"])), data=data)
    with pytest.raises(ModelError, match="reads images by torchvision, which is not installed") as told:
        load_processing_class(config)
    assert "pip install torchvision" in told.value.hint
