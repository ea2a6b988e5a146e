"""Which architectures the installed transformers knows, and by which of its classes: read from its tables, not imported."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from engine.hardware import installed

_TABLES = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
_FEWEST = 50
"""Architectures below which the tables were not understood, and nothing is said by them."""


def loaders_of(model_type: str) -> frozenset[str] | None:
    """The classes that serve an architecture, none for one that is not known; `None` where the tables cannot be read."""
    tables = _tables()
    if tables is None or not model_type:
        return None
    known, classes = tables
    return frozenset(name for name, served in classes.items() if model_type in known and model_type in served)


_BY_TORCHVISION = ("PixtralProcessor", "Gemma4Processor")
"""Processors that ask for torchvision themselves or for their videos, whatever reads their images."""


_UNSEEN_BEFORE_5_18 = (
    "Idefics2ImageProcessor",
    "Idefics3ImageProcessor",
    "Ovis2ImageProcessor",
    "SmolVLMImageProcessor",
)
"""Whose class for Pillow transformers before 5.18 gives to those alone who have torchvision too."""


def needs_torchvision(processor: str, image_processor: str) -> bool | None:
    """Whether transformers reads the images of these classes by torchvision alone; `None` where its tables do not say."""
    if processor in _BY_TORCHVISION:
        return True
    if image_processor in _UNSEEN_BEFORE_5_18 and importlib.util.find_spec("torchvision") is None and _before_5_18():
        return True
    classes = _image_processors()
    if not image_processor or f'"{image_processor}"' not in classes:
        return None
    return f'"{image_processor}Pil"' not in classes


def _before_5_18() -> bool:
    return tuple(int(part) for part in re.findall(r"\d+", installed("transformers") or "")[:2]) < (5, 18)


@cache
def _image_processors() -> str:
    """The text of transformers' tables of image processors; empty where they cannot be read."""
    spec = importlib.util.find_spec("transformers")
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        return ""
    folder = Path(folders[0]) / "models" / "auto"
    try:
        return "".join((folder / name).read_text("utf-8") for name in ("auto_mappings.py", "image_processing_auto.py"))
    except OSError:
        return ""


@cache
def _tables() -> tuple[frozenset[str], dict[str, frozenset[str]]] | None:
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "models" / "auto"
    try:
        configs = "".join((folder / name).read_text("utf-8") for name in ("auto_mappings.py", "configuration_auto.py"))
        models = (folder / "modeling_auto.py").read_text("utf-8")
    except OSError:
        return None
    known = frozenset(re.findall(r'"([^"]+)"[,:] "\w+Config"', configs))
    classes = {name: _served(models, table) for name, table in _TABLES.items()}
    return (known, classes) if len(known) >= _FEWEST and all(map(bool, classes.values())) else None


def _served(text: str, table: str) -> frozenset[str]:
    begin = re.search(rf"^{table} = OrderedDict\(", text, re.MULTILINE)
    if begin is None:
        return frozenset()
    return frozenset(re.findall(r'\("([^"]+)",', text[begin.end() :].partition("\n)")[0]))
