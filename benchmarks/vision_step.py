"""A training step on images, ours against TRL's default: a model of Qwen2.5-VL-3B's shape, rows of text with one picture each.

    python benchmarks/vision_step.py [--arms ...] [--seconds 90] [--rounds 20] [--window 2] [--profile ARM]
                                     [--results FILE --commit HASH]
    python benchmarks/vision_step.py --arms ours streamed nf4 fp8 offloaded selective tiled cut compiled
    python benchmarks/vision_step.py --shape tiny --tokens 128 --arms default "ours by default" cut --rounds 1 --check

LoRA r=16 on all linear layers, of the vision tower too, random weights drawn on the device in bf16, 4 rows of 1,024 tokens
a step, each with a JPEG of 640 x 480 that becomes 391 of them; a prompt with an answer, of which the answer is learned. The
processor is transformers' own class over the tokenizer of `builtin/tiny` with the marks of images added, so nothing is
fetched; its words are shorter than Qwen's, which changes no shape. `default` is TRL's SFTTrainer as it comes, with its own
collator for images (autocast, float32 adapters, rows rendered and tokenized at every step); ours prepare the same rows first
(`engine.data.prepare`) and read the pictures when a batch is made. The arms are those of `_arms.py`, timed in turn as in
`gpu_methods.py`: first loss and gradient norm from one seed are compared with TRL's. The goal, 1.5 times TRL's tokens a
second, is held against our fastest arm. The second call is what each feature that serves text makes of such a step: its time,
the memory that it would take alone, its first losses and gradient norm beside those of `ours`, bf16 with no feature on.
`--shape tiny` runs all of it on the CPU in float32, which shows that the arms run
and learn the same, and no time of interest.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from _arms import ARMS, PEERS, Builder, precision, settings
from _figures import Results, ratio, result_options
from _random_base import linear_in_nf4
from _turns import CARD, Arm
from datasets import Dataset, Image
from datasets import Sequence as Many
from gpu_methods import compare, say
from trl import SFTTrainer

from engine.builtin import dates
from engine.data.gather_facts import gather_facts
from engine.data.prepare import prepare
from engine.data.vision import ImageTokens
from engine.models.load import load_processing_class
from engine.planning import memory_model

GOAL = 1.5
"""Our tokens a second in those of TRL's default."""
WORK = "step_vl_3b_lora"
COUNT = 64
ARMS_HERE = ["default", "ours by default", "cut, fused, lora, auto", "cut, compiled, auto"]
MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}{%- for part in message['content'] -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] -}}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""No line break behind a turn: of an answer TRL would learn that too, which is the template's."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The parts of a Qwen2.5-VL, and the picture that its rows show."""

    text: dict[str, Any]
    vision: dict[str, Any]
    picture: tuple[int, int]


SHAPES = {
    "3b": Shape(
        {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16,
         "num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 128_000, "rms_norm_eps": 1e-6,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
         "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": 2048},
        (640, 480),
    ),
    "tiny": Shape(
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 1024,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14, "window_size": 56,
         "fullatt_block_indexes": [1], "out_hidden_size": 64},
        (140, 84),
    ),
}  # fmt: skip


class VisionBuilder(Builder):
    """The arms around a model that sees: its rows are files, which TRL reads as a dataset and ours prepare as a run does."""

    drawn: Any = None
    """The model that no arm trains, whose numbers all share."""

    def __init__(self, options: argparse.Namespace, method: str, folder: Path, tokenizer: Any) -> None:
        self.size = SHAPES[options.shape]
        # Its files, as a hub has them: the processor is made from these.
        loaded = transformers.AutoTokenizer.from_pretrained(tokenizer.name_or_path, extra_special_tokens=MARKS)
        loaded.save_pretrained(folder)
        write_processor(folder, self.size.vision["patch_size"])
        super().__init__(options, method, folder, loaded)

    def model_config(self) -> Any:
        shape = transformers.Qwen2_5_VLConfig(
            text_config={**self.size.text, "pad_token_id": self.tokenizer.pad_token_id, "tie_word_embeddings": True},
            vision_config=self.size.vision,
            tie_word_embeddings=True,
            **{f"{name}_id": self.tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()},
        )
        shape.architectures = ["Qwen2_5_VLForConditionalGeneration"]
        write_header(self.folder / "model.safetensors", self.loader(), shape)
        return shape

    def loader(self) -> Any:
        return transformers.AutoModelForImageTextToText

    def base(self, packed: str = "", *, on_host: bool = False) -> Any:
        """The weights that all arms share. In NF4 every linear layer but the head is packed from them, of the vision tower
        too, as a run loads it; layers that stream leave the shared ones alone and wait on the host as their own."""
        if self.drawn is None:
            torch.manual_seed(0)
            with torch.device(self.device):
                dtype = getattr(torch, precision(self.options))
                self.drawn = self.loader().from_config(copy.deepcopy(self.shape), dtype=dtype)
        own = {id(weight): torch.nn.Parameter(weight.detach()) for weight in self.drawn.parameters()}
        model = copy.deepcopy(self.drawn, own)
        torch.manual_seed(0)  # adapters are drawn next, alike for each arm
        if packed:
            for path, module in list(model.named_modules()):
                if type(module) is torch.nn.Linear and path != "lm_head":
                    model.set_submodule(path, linear_in_nf4(module, module.weight))
            model.is_loaded_in_4bit = True
        return model

    def prepared_rows(self) -> Any:
        config = settings(self.options, self.method, {}, self.folder)
        self.tokenizer = load_processing_class(config)
        self.file = file = self.folder.parent / "rows.jsonl"
        self.written = write_rows(file, self.tokenizer, self.options.tokens, self.size.picture)
        told = {"data": config.data.model_copy(update={"train": [type(config.data.train[0])(path=str(file))]})}
        prepared = prepare(config.model_copy(update=told), self.tokenizer)
        self.counted, found = prepared.facts, prepared.dataset
        lengths = {len(row["input_ids"]) for row in found}
        assert lengths == {self.options.tokens}, lengths
        return found

    def arm(self, name: str) -> Arm:
        """The arm; of ours the memory that the estimate has for it is told, for rows like these."""
        made = super().arm(name)
        if name not in PEERS and (classes := self.estimate(name)):
            parts = ", ".join(f"{part} {size / 2**30:.2f}" for part, size in classes.items() if size > 2**24)
            made.told += f" estimated {sum(classes.values()) / 2**30:.2f} GiB ({parts}),"
        return made

    def estimate(self, name: str) -> dict[str, int]:
        """Bytes by class, as `workbench estimate` has them."""
        config = self.config(name)
        given = config.data.model_copy(update={"train": [type(config.data.train[0])(path=str(self.file))]})
        config = config.model_copy(update={"data": given})
        facts = dataclasses.replace(gather_facts(config, self.folder.parent), data=self.counted)
        return memory_model.memory(config, facts, config.memory.gradient_checkpointing) or {}

    def plain(self, config: Any, arguments: Any, model: Any) -> Any:
        """TRL's trainer with its own collator, which renders and tokenizes each batch of the dataset."""
        rows = Dataset.from_list(self.written).cast_column("images", Many(Image()))
        arguments = dataclasses.replace(arguments, max_length=self.options.tokens, dataset_kwargs=None)
        return SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=self.tokenizer)


def write_processor(folder: Path, patch: int) -> None:
    """The files of Qwen2.5-VL's processor beside its tokenizer's."""
    images = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 4 * patch**2, "longest_edge": 12_845_056},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    videos = {"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": patch}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_header(file: Path, loader: Any, shape: Any) -> None:
    """A file of weights as far as an estimate reads it: names, formats and sizes, and a hole where the numbers would be."""
    with torch.device("meta"):
        model = loader.from_config(copy.deepcopy(shape), dtype=torch.bfloat16)
    header: dict[str, Any] = {}
    end = 0
    for name, weight in model.named_parameters():
        begin, end = end, end + weight.nbytes
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
    told = json.dumps(header).encode()
    file.write_bytes(len(told).to_bytes(8, "little") + told)
    os.truncate(file, file.stat().st_size + end)


def write_rows(file: Path, processor: Any, tokens: int, picture: tuple[int, int]) -> list[dict[str, Any]]:
    """Rows of exactly so many tokens, and their pictures beside them; with the paths as TRL's dataset needs them."""
    from PIL import Image as Pillow

    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, row in enumerate(dates.rows(count=COUNT)):
        place = file.parent / f"{number}.jpg"
        noise = torch.randint(0, 256, (12, 16, 3), dtype=torch.uint8, generator=generator).numpy()
        Pillow.fromarray(noise).resize(picture, Pillow.Resampling.BICUBIC).save(place, quality=90)
        question, answer = (row["messages"][end]["content"] for end in (0, -1))
        rows.append(_of_length(processor, question, answer, str(place), tokens))
    file.write_text("\n".join(map(json.dumps, rows)))
    return rows


def _of_length(processor: Any, question: str, answer: str, image: str, tokens: int) -> dict[str, Any]:
    """A row whose answer is said again and again, until all of it are so many tokens."""

    def row(text: str) -> dict[str, Any]:
        asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        return {"prompt": asked, "completion": [{"role": "assistant", "content": text}], "images": [image]}

    def length(text: str) -> int:
        whole = processor.tokenizer.apply_chat_template(
            [*row(text)["prompt"], *row(text)["completion"]], chat_template=TEMPLATE, tokenize=False
        )
        return len(processor.tokenizer(whole, add_special_tokens=False)["input_ids"])

    expanded = ImageTokens(processor).resized(image).tokens
    wanted = tokens - len(processor.tokenizer(expanded, add_special_tokens=False)["input_ids"]) + 1
    once, twice = length(answer), length(f"{answer} {answer}")
    text = " ".join([answer] * (1 + (wanted - once) // (twice - once)))
    while length(text) < wanted:
        text += " 7"
    while length(text) > wanted:
        text = text[:-1]
    assert length(text) == wanted, (length(text), wanted)
    return row(text)


class Figures(Results):
    """The rows under the name of the work, each said in tokens a second; what the arms took is kept for the goal."""

    def __init__(self, given: argparse.Namespace, device: str) -> None:
        super().__init__(given, device, "torch", "triton")
        self.work = WORK if given.shape == "3b" else f"{WORK}, {given.shape}"
        self.tokens = given.rows * given.tokens
        self.times: dict[str, Sequence[float]] = {}

    def under(self, work: str, shape: str, impl: str, ms: Sequence[float], peak_mib: float | None) -> tuple[str, str]:
        """Under our name of the work, whatever the arms' script has."""
        self.times[impl] = ms
        speed = self.tokens / statistics.median(ms) * 1e3
        say(f"{self.work:20} {impl:26} {speed:8,.0f} tokens/s {(peak_mib or 0) / 1024:6.2f} GiB")
        return self.work, f"{shape}; one image a row"

    def judge(self) -> None:
        """Says how our fastest arm stands to the goal."""
        theirs = self.times.get("trl default")
        ours = {name: each for name, each in self.times.items() if not name.startswith("trl ")}
        if theirs is None or not ours or self.work != WORK:
            say("no goal at this shape or without TRL's default")
            return
        best = min(ours, key=lambda name: statistics.median(ours[name]))
        middle, low, high = ratio(list(zip(theirs, ours[best], strict=True)))
        said = "MET" if middle >= GOAL else "missed"
        say(f"{best}: {middle:.3f} [{low:.3f}, {high:.3f}] of TRL's default in tokens/s; goal {GOAL}: {said}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="*", default=ARMS_HERE, choices=list(ARMS))
    parser.add_argument("--shape", choices=list(SHAPES), default="3b")
    parser.add_argument("--rows", type=int, default=4, help="rows a step")
    parser.add_argument("--tokens", type=int, default=1024, help="of a row, its image's among them")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each arm at most")
    parser.add_argument("--window", type=int, default=2, help="steps of an arm before the next has its turn")
    parser.add_argument(
        "--seconds", type=float, default=90, help="building and compiling included; no round is begun later"
    )
    parser.add_argument("--profile", choices=list(ARMS), help="the kernels of one step of this arm")
    parser.add_argument("--check", action="store_true", help="exit 1 where an arm fell or began apart from the first")
    result_options(parser)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    device = torch.cuda.get_device_name() if CARD else "cpu"
    say(json.dumps({"device": device, "torch": torch.__version__, "transformers": transformers.__version__}))
    figures = Figures(given, device)
    options = argparse.Namespace(**vars(given), full=False, ragged=True)
    sound = compare(options, "sft", given.arms, time.perf_counter() + given.seconds, figures, VisionBuilder)
    figures.judge()
    return int(given.check and not sound)


if __name__ == "__main__":
    sys.exit(main())
