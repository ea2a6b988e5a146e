"""Preparing chat rows, cold: ours with exact masks, TRL's with a process a core, and the least that either must do.

    python benchmarks/preparing.py --rows FILE --tokenizer FOLDER [--count 20000] [--rounds 3] [--processes 2]
                                   [--results FILE --commit HASH]

`FILE` holds rows of `question` and `answer`, which are repeated with a number of their own until there are `count`; `FOLDER`
is a tokenizer with a chat template. In each round all are prepared once, in turn: by `engine.data.prepare` into an empty
cache; by TRL's SFTTrainer (`dataset_num_proc`, no cache), whose model is two layers of a few numbers; rendered once; and
tokenized in one batch. The clock and the processes' CPU seconds are printed, which a busy machine tells apart; kept is the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _device import processor
from _figures import Results, result_options


def conversations(file: Path, count: int) -> list[list[dict[str, str]]]:
    """So many chats of a question and an answer, no two of them alike."""
    rows = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]
    return [
        [
            {"role": "user", "content": f"{number}. {rows[number % len(rows)]['question']}"},
            {"role": "assistant", "content": rows[number % len(rows)]["answer"]},
        ]
        for number in range(count)
    ]


def ours(chats: list[Any], tokenizer: Any, folder: Path) -> Callable[[], None]:
    """Prepared by the engine from a file, into a cache of its own each time."""
    from engine.config.data import Data, DataSource
    from engine.config.model import Model
    from engine.data.prepare import prepare

    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), "utf-8")

    def run() -> None:
        cache = tempfile.mkdtemp(dir=folder)
        data = Data(train=[DataSource(path=str(file))], dataset_prepared_path=cache, max_length=4096)
        config: Any = SimpleNamespace(
            method=SimpleNamespace(kind="sft"), model=Model(name="none"), data=data, run=SimpleNamespace(seed=1)
        )
        assert len(prepare(config, tokenizer).dataset) == len(chats)

    return run


def peer(chats: list[Any], tokenizer: Any, folder: Path, processes: int) -> Callable[[], None]:
    """Prepared by TRL's trainer for SFT, which masks nothing of these rows."""
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets.disable_caching()
    datasets.disable_progress_bars()
    file = folder / "rows.jsonl"
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1
    )
    model = LlamaForCausalLM(shape)

    def run() -> None:
        cache = tempfile.mkdtemp(dir=folder)
        rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
        args = SFTConfig(
            output_dir=cache, dataset_num_proc=processes, max_length=4096, report_to="none", use_cpu=True, bf16=False
        )
        trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
        assert len(trainer.train_dataset) == len(chats)

    return run


def bare(chats: list[Any], tokenizer: Any) -> dict[str, Callable[[], None]]:
    """The chat template once a row, and the tokenizer's batch of what it wrote."""
    texts: list[str] = tokenizer.apply_chat_template(chats, tokenize=False)

    def tokenize() -> None:
        for start in range(0, len(texts), 1000):
            tokenizer(texts[start : start + 1000], add_special_tokens=False, return_offsets_mapping=True)

    return {"rendered once": lambda: tokenizer.apply_chat_template(chats, tokenize=False), "tokenized": tokenize}


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU in this process and those that have ended."""
    before, began = _cpu(), time.perf_counter()
    run()
    return time.perf_counter() - began, _cpu() - before


def _cpu() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    """Prepare, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    result_options(parser)
    given = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    chats = conversations(given.rows, given.count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {"ours": ours(chats, tokenizer, folder)}
        runs["trl"] = peer(chats, tokenizer, folder, given.processes)
        runs |= bare(chats, tokenizer)
        times: dict[str, list[tuple[float, float]]] = {each: [] for each in runs}
        for _ in range(given.rounds):
            for each, run in runs.items():
                times[each].append(timed(run))
    results = Results(given, processor())
    for each, found in times.items():
        clock, cpu = (statistics.median(part) for part in zip(*found, strict=True))
        print(f"{each:<16}{clock:8.2f} s   {cpu:8.2f} s of CPU")
        shape = f"{given.count} chats, {given.processes} processes"
        results.add("preparing", shape, each, ms=[1000 * one for one, _ in found])


if __name__ == "__main__":
    main()
