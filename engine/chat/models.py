"""The models of a chat: each base once, and its adapters beside it, switched on for whoever answers.

Two sides share one model where they stand on the same weights in the same numbers: the base model and a LoRA checkpoint
of it, two checkpoints of one run, two runs of one model. Where a run trained the weights themselves there is a model a
side. What a side knows beside its weights (tokenizer, template, marks that end an answer) is its run's own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import model_files
from engine.config.adapter import Lora
from engine.config.files import parse
from engine.config.tree import RunConfig, fields
from engine.errors import ModelError, WorkbenchError, redact, visible
from engine.features.packed_experts import EXPERTS_ALONE
from engine.figures import size
from engine.hub import COMMITS, COMMITS_FILE, commit_of, reaching_hub
from engine.planning.memory_model import QUANTIZED
from engine.run import checkpoint, inside
from engine.run.store import RunFolder

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

    from engine.data.chat import Chat

Phase = Callable[[str], None]


@dataclass
class Side:
    """Who answers: a model, with the adapter of one checkpoint, with that of none, or with weights of its own.

    `positions` is how many tokens the model can read, None where its config names no number; `stops` are the ids that end
    an answer.
    """

    title: str
    config: RunConfig
    processing_class: Any
    chat: Chat | None
    model: Any = None
    adapter: str | None = None
    positions: int | None = None
    stops: list[int] = field(default_factory=list)
    commits: bytes | None = None
    """The run's file of commits: which ones its models of the hub were when it trained."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, also where the model has a processor around it."""
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    @contextlib.contextmanager
    def active(self) -> Iterator[torch.nn.Module]:
        """The model as this side, until the block ends."""
        from peft import PeftModel

        if not isinstance(self.model, PeftModel):
            yield self.model
        elif self.adapter is None:
            with self.model.disable_adapter():
                yield self.model
        else:
            self.model.set_adapter(self.adapter)
            yield self.model


def load_sides(asked: Sequence[Mapping[str, Any]], say: Phase) -> list[Side]:
    """The sides that are asked for, each `title`, `run` (a folder) and `checkpoint` (a step; None: the base model, `as_begun` with
    the adapter that training went on from).

    Raises WorkbenchError: for a checkpoint that is not whole, a tokenizer that is another than the checkpoint's, a model
    that this machine has no memory for, and all that `engine.features.load.load` refuses.
    """
    say("Loading the libraries")
    from engine.data.tokens import chat_of
    from engine.models.adapter_folder import as_begun
    from engine.models.load import load_processing_class

    sides: list[Side] = []
    folders: list[Path | None] = []
    known: dict[str, Side] = {}
    for one in asked:
        run = RunFolder(str(one["run"]))
        if (first := known.get(str(run.path))) is None:
            config = config_of(run)
            commits = inside.read(run, COMMITS_FILE) if inside.exists(run, COMMITS_FILE) else None
            _as_trained(commits)
            say("Loading the tokenizer")
            processing_class = load_processing_class(config)
            # Before there are weights: a child that is forked now holds none of them.
            first = Side("", config, processing_class, chat_of(config, processing_class), commits=commits)
            known[str(run.path)] = first
        step = one.get("checkpoint")
        folder = run.checkpoints / f"checkpoint-{step}" if step is not None else None
        if folder is not None:
            _check_checkpoint(run, folder, first)
        elif one.get("as_begun"):
            folder = as_begun(first.config)
        sides.append(replace(first, title=str(one["title"])))
        folders.append(folder)
    _load(sides, folders, say)
    return sides


def _as_trained(commits: bytes | None) -> None:
    """Models of the hub are read from now on at the commits that a run has noted."""
    COMMITS.keep(commits, lambda _: None)


def config_of(run: RunFolder) -> RunConfig:
    """The run's config, no `auto` left but for what reads images. Raises WorkbenchError with the first error in it."""
    from engine.planning.auto import resolved
    from engine.rules import read

    reading = read(parse(run.read_config(), path=run.config).mapping)
    for finding in reading.errors:
        if finding.path.startswith(("model", "method", "adapter")):
            raise WorkbenchError(finding.message)
    # What reads images is seen where they are read.
    backend = reading.config.data.image_backend
    return resolved(reading.config).with_values({fields.data.image_backend: backend})


def _check_checkpoint(run: RunFolder, folder: Path, side: Side) -> None:
    if reason := checkpoint.problem_with(folder):
        raise WorkbenchError(f"{run.id}: {folder.name} cannot be used: {reason}.", "Name another with --checkpoint.")
    model_files.refuse_what_it_names(folder)
    config, tokenizer = side.config, side.tokenizer
    if config.adapter.kind != "none":
        model_files.refuse_pickled_adapter(folder)
    stored = folder / "tokenizer.json"
    if not stored.is_file():
        return
    known = _vocabulary(stored)
    if known is not None and any(tokenizer.convert_tokens_to_ids(token) != id for token, id in known.items()):
        name = visible(redact(str(config.model.tokenizer or config.model.name)))
        raise ModelError(
            f"{run.id}: {folder.name} was trained with another tokenizer than {name} has now, so the model would read other "
            "words than were written.",
            "Put back the tokenizer that the run began with.",
        )


def _vocabulary(file: Path) -> dict[str, int] | None:
    """Ids by token, those that were added included; None for a kind of tokenizer that keeps them otherwise."""
    content = model_files.read_json(file)
    try:
        words = content["model"]["vocab"]
        if not isinstance(words, dict):
            return None
        return {**words, **{token["content"]: token["id"] for token in content.get("added_tokens") or []}}
    except (KeyError, TypeError):
        return None


def _load(sides: list[Side], folders: list[Path | None], say: Phase) -> None:
    import torch

    from engine.features.packed_experts.apply import compute_packed

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    groups: dict[str, list[int]] = {}
    for number, (side, folder) in enumerate(zip(sides, folders, strict=True)):
        groups.setdefault(_weights_of(side, folder, number), []).append(number)
    _check_memory([sides[numbers[0]].config for numbers in groups.values()], device)
    for numbers in groups.values():
        _as_trained(sides[numbers[0]].commits)
        model = _model(sides[numbers[0]].config, device, say)
        for number in numbers:
            side, folder = sides[number], folders[number]
            if folder is not None and side.config.adapter.kind == "none":
                from engine.models.restore_weights import take_up

                say(f"Loading {folder.name}")
                take_up(model, folder)
            elif folder is not None:
                say(f"Loading {folder.name}")
                side.adapter = f"side{number}"
                model = _with_adapter(model, side.config, folder, side.adapter)
        if not _placed(sides[numbers[0]].config):
            model.to(device)
        model.eval().requires_grad_(False)
        compute_packed(model)
        for number in numbers:
            _finish(sides[number], model)


def _weights_of(side: Side, folder: Path | None, number: int) -> str:
    """Equal for sides that can share one model."""
    config, commits = side.config, (side.commits or b"").decode()
    model, adapter = config.model, config.adapter
    alone = folder is not None and (adapter.kind == "none" or adapter.bias != "none" or bool(adapter.target_parameters))
    head = config.method.head
    held = [model.dtype, model.quantization, model.quantize_moe_experts]
    key = [model.name, model.revision, model.tokenizer, *held, model.attention, head, commits]
    return json.dumps([*key, number if alone else -1], default=str)


def _placed(config: RunConfig) -> bool:
    """Whether loading has put the model on its device already."""
    return config.model.quantization not in ("none", "fp8", *EXPERTS_ALONE)


def _check_memory(configs: Sequence[RunConfig], device: torch.device) -> None:
    """Raises WorkbenchError where these models do not fit into what is free, as far as their files tell."""
    import psutil
    import torch

    from engine.models.load import model_folder

    need = 0
    for config in configs:
        source = model_folder(config)
        with reaching_hub(source), contextlib.suppress(ModelError):
            folder = model_files.complete(source, commit_of(source, config.model.revision))
            weights = model_files.stored_weights(folder)
            bits = {"nf4": 4.5, "fp4": 4.5, "int8": 8, "fp8": 8}.get(
                config.model.quantization, getattr(torch, config.model.dtype).itemsize * 8
            )
            for name, weight in weights.items():
                experts = config.model.quantization in EXPERTS_ALONE and ".experts." in name and len(weight.shape) > 1
                # Bytes that hold MXFP4 or FP8 already stay bytes.
                own = (
                    8
                    if weight.dtype in ("U8", "F8_E4M3")
                    else 8 * QUANTIZED[config.model.quantization]
                    if experts
                    else bits
                )
                need += int(_numel(weight.shape) * own / 8)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if need > free:
        many = "models need" if len(configs) > 1 else "model needs"
        raise WorkbenchError(
            f"the {many} {size(need)}, and {size(free)} of memory are free on the {'GPU' if device.type == 'cuda' else 'machine'}.",
            "Talk to one side alone with --tuned or --base, stop what takes the memory, or take --device cpu.",
        )


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _model(config: RunConfig, device: torch.device, say: Phase) -> Any:
    from engine.features.load import load_model

    say(f"Loading {visible(redact(config.model.name))} on {'the GPU' if device.type == 'cuda' else 'the CPU'}")
    return load_model(config)


def _with_adapter(model: PreTrainedModel | PeftModel, config: RunConfig, folder: Path, name: str) -> PeftModel:
    """The model with the adapter of a checkpoint beside those that it has, in the number format of its training."""
    from engine.models.layer_names import open_adapter

    own = isinstance(config.adapter, Lora) and config.adapter.autocast_adapter_dtype
    in_float32 = config.model.dtype != "bfloat16" or own
    return open_adapter(model, str(folder), name, autocast_adapter_dtype=in_float32)


def _finish(side: Side, model: PreTrainedModel | PeftModel) -> None:
    from engine.generate import end_of_turn, stop_ids

    side.model = model
    side.stops = stop_ids(model, side.tokenizer, end_of_turn(side.tokenizer, side.chat))
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    positions = getattr(text, "max_position_embeddings", None)
    side.positions = positions if isinstance(positions, int) and positions > 0 else None
    if side.config.method.head == "score":
        # The score is read at the last token that is no padding.
        pad = side.tokenizer.pad_token_id
        model.config.pad_token_id = side.tokenizer.eos_token_id if pad is None else pad
