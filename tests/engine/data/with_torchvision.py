"""Run with torchvision on its path, by `test_torchvision.py`: families read images by it, and by Pillow where they can.

    python -m tests.engine.data.with_torchvision FOLDER TOKENIZER FAMILY...

Prints a line of JSON for each family, idefics3 among them: how far the pixels of both ways are apart in the mean, the losses of a step and of the next. Then a
run of two steps by the product's worker, whose folder is FOLDER/run.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from engine.config.files import as_yaml
from engine.config.tree import RunConfig
from engine.data.collate import collator_for
from engine.data.prepare import prepare
from engine.models.load import load_processing_class
from engine.rules import read
from engine.run.store import create
from tests.engine.seeing import FAMILIES
from tests.families.vision import FAMILIES as MORE

TEN = {**FAMILIES, **{name: MORE[name] for name in ("pixtral", "mistral3", "lfm2_vl")}}
PILLOW = tuple(FAMILIES)


def mapping_of(folder: Path, model: Path, backend: str) -> dict[str, Any]:
    return {
        "version": 1,
        "model": {"name": str(model), "dtype": "float32"},
        "adapter": {"kind": "none"},
        "data": {"train": [{"path": str(folder / "rows.jsonl")}], "max_length": 256, "image_backend": backend},
        "optim": {"per_device_train_batch_size": 2, "max_steps": 2, "learning_rate": 0.01},
    }


def rows(folder: Path) -> None:
    """Two rows with pictures of noise below white, whose sizes no family takes as they are."""
    draw = random.Random(0)
    lines = []
    for number, size in enumerate(((70, 45), (52, 90))):
        picture = Image.new("RGB", size, "white")
        picture.paste(Image.frombytes("RGB", (40, 30), draw.randbytes(40 * 30 * 3)), (5, 9))
        picture.save(folder / f"{number}.png")
        turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "It is noise."}]
        lines.append(json.dumps({"messages": turns, "images": [f"{number}.png"]}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))


def batch_of(config: RunConfig) -> tuple[dict[str, torch.Tensor], str]:
    """What the model is given for both rows, and the place of the prepared rows."""
    processor = load_processing_class(config)
    prepared = prepare(config, processor)
    return dict(collator_for(config, processor)(list(prepared.dataset))), str(prepared.folder)


def steps(model_folder: Path, batch: dict[str, torch.Tensor]) -> list[float]:
    """The loss before and after a step."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_pretrained(model_folder).train()
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def told(name: str, folder: Path, tokenizer: Path) -> dict[str, Any]:
    model = TEN[name](tokenizer, folder / name)
    config = read(mapping_of(folder, model, "torchvision")).config
    batch, place = batch_of(config)
    found = {"family": name, "pixels": batch["pixel_values"].numel(), "losses": steps(model, batch)}
    if name in PILLOW:
        other, elsewhere = batch_of(read(mapping_of(folder, model, "pil")).config)
        found["apart"] = float((batch["pixel_values"].float() - other["pixel_values"].float()).abs().mean())
        found["tokens_equal"] = torch.equal(batch["input_ids"], other["input_ids"])
        found["losses_pil"] = steps(model, other)
        found["own_cache"] = place != elsewhere
    return found


def main() -> None:
    from engine.worker import main as work

    folder, tokenizer = Path(sys.argv[1]), Path(sys.argv[2])
    rows(folder)
    for name in sys.argv[3:]:
        print(json.dumps(told(name, folder, tokenizer)), flush=True)
    mapping = mapping_of(folder, folder / "idefics3", "torchvision")
    run = create(folder / "runs", as_yaml(mapping), {"method": "sft", "model": "idefics3"})
    code = work(str(run.path))
    print(json.dumps({"run": run.path.name, "code": code}), flush=True)


if __name__ == "__main__":
    main()
