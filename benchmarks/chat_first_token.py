"""How a chat answers beside transformers' own `generate`: the first token, and tokens a second, in pairs on this machine.

    python benchmarks/chat_first_token.py RUN [--pairs 200] [--tokens 128] [--device auto|cpu] [--results FILE --commit HASH]
    python benchmarks/chat_first_token.py --make FOLDER [--shape 0.6b|8b|tiny]

Each pair asks the chat's process and calls `generate` here, in turns of changing order, with the same model, prompt and
device; both must give the same tokens. Prints medians and the median of the ratios with its 95 % interval (bootstrap).
`--seconds` ends the pairs after that time, but not before ten were taken. A pair takes two answers and one token: of the 0.6b shape
with 48 tokens on a card some 3 s where a token takes 30 ms, so that `--pairs 12 --tokens 48 --device auto --seconds 90` with its three
pairs to warm up and both loads fits into two minutes and a half. `--make` writes a model of Qwen3's shape and a LoRA
adapter beside it, both of random numbers, as a run that has ended, and prints its folder; TRL is not needed for any of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from _figures import Results, ratio, result_options

from engine.builtin import tiny
from engine.chat.models import load_sides
from engine.run import checkpoint, store
from engine.run.store import RunFolder
from engine.session.chat import ChatSession, who_answers

LEAST_PAIRS = 10
PROMPT = "What is 3 March 2021 in ISO form?"


class Chat:
    """The chat's process, asked through its pipe."""

    def __init__(self, session: ChatSession) -> None:
        self.session = session

    def __call__(self, tokens: int) -> tuple[float, float, list[int]]:
        """Seconds from asking to the first token and to the end, and the ids."""
        came = threading.Event()
        at: list[float] = []

        def hear(_: dict[str, Any]) -> None:
            at.append(time.perf_counter())
            came.set()

        sampling = {"max_new_tokens": tokens, "temperature": 0.0, "top_p": 1.0, "seed": 0}
        messages = [{"role": "user", "content": PROMPT}]
        began = time.perf_counter()
        ticket = self.session._client.ask("answer", on_progress=hear, side=0, messages=messages, sampling=sampling)
        found = ticket.result(120)
        ended = time.perf_counter()
        came.wait(60)
        return at[0] - began, ended - began, found["ids"]


class Generate:
    """transformers in this process: the text rendered, tokenized and generated from."""

    def __init__(self, side: Any) -> None:
        self.side = side

    def __call__(self, tokens: int) -> tuple[float, float, list[int]]:
        """Seconds until one token was made and until all were, and the ids."""
        first, _ = self._run(1)
        whole, ids = self._run(tokens) if tokens > 1 else (first, [])
        return first, whole, ids

    def _run(self, tokens: int) -> tuple[float, list[int]]:
        side = self.side
        began = time.perf_counter()
        text = side.chat.render([{"role": "user", "content": PROMPT}], prompt=True)
        given = side.tokenizer(text, add_special_tokens=False, return_tensors="pt").to(side.model.device)
        with torch.no_grad(), side.active() as model:
            made = model.generate(
                **given, do_sample=False, max_new_tokens=tokens, eos_token_id=side.stops, pad_token_id=0
            )
        ids = made[0, given["input_ids"].shape[1] :].tolist()
        return time.perf_counter() - began, [each for each in ids if each not in side.stops]


SHAPES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
             "tie_word_embeddings": True},
}  # fmt: skip


def make(folder: Path, shape: str) -> RunFolder:
    """A run to talk to: a model and an adapter of random numbers, the tokenizer of the built-in model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    ends = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    config = Qwen3Config(num_key_value_heads=8, head_dim=128, vocab_size=151_936, **SHAPES[shape], **ends)
    model_folder = folder / "model"
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(model_folder)
    tokenizer.save_pretrained(model_folder)
    text = (
        f"version: 1\nmodel: {{name: {model_folder}, dtype: bfloat16}}\nmethod: {{kind: sft}}\nadapter: {{kind: lora}}\n"
        "data: {train: [{path: builtin/dates}]}\noptim: {max_steps: 2}\n"
    )
    run = store.create(folder / "runs", text, {"name": "chat", "method": "sft", "model": str(model_folder)})
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False))
    room = checkpoint.begin(run, 2)
    adapted.save_pretrained(room)
    tokenizer.save_pretrained(room)
    checkpoint.commit(room, {})
    run.update_json(state="finished")
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1, help="of an answer; 1 for the first token alone")
    parser.add_argument("--device", choices=["auto", "cpu"], default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for the pairs")
    parser.add_argument("--make", type=Path, metavar="FOLDER")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b", help="of the model that is made")
    result_options(parser)
    options = parser.parse_args()
    if options.make:
        print(make(options.make.absolute(), options.shape).path)
        return
    place = os.path.abspath(options.run)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    run = RunFolder(place)
    with closing(ChatSession(who_answers([run], only="tuned"), device=options.device)) as session:
        session.load().result(300)
        told = {"title": "here", "run": place, "checkpoint": session.who[0].checkpoint}
        (side,) = load_sides([told], lambda _: None)
        arms = Chat(session), Generate(side)
        found: tuple[list[Any], list[Any]] = [], []
        began = time.monotonic()
        for number in range(-3, options.pairs):
            order = (0, 1) if number % 2 else (1, 0)
            said = {each: arms[each](options.tokens) for each in order}
            if options.tokens > 1 and said[0][2] != said[1][2]:
                raise SystemExit(f"other tokens: {said[0][2][:20]} and {said[1][2][:20]}")
            if time.monotonic() - began > options.seconds and len(found[0]) >= LEAST_PAIRS:
                break
            if number >= 0:
                found[0].append(said[0])
                found[1].append(said[1])
    pairs = len(found[0])
    where = f"{side.model.device.type}, {sum(p.numel() for p in side.model.parameters()):,} numbers"
    device = torch.cuda.get_device_name() if side.model.device.type == "cuda" else "cpu"
    results = Results(options, device, "torch")
    for column, work in enumerate(("chat_first_token", "chat_answer") if options.tokens > 1 else ("chat_first_token",)):
        ours, theirs = ([1000 * each[column] for each in side_found] for side_found in found)
        middle, low, high = ratio(list(zip(ours, theirs, strict=True)))
        shape = f"{options.tokens} tokens; {where}; {pairs} pairs; / generate {middle:.3f} [{low:.3f}, {high:.3f}]"
        print(f"{work}: chat {statistics.median(ours):.1f} ms, generate {statistics.median(theirs):.1f} ms, {shape}")
        results.add(work, shape, "ours", ms=ours)
        results.add(work, f"{options.tokens} tokens; {where}; {pairs} pairs", "transformers generate", ms=theirs)


if __name__ == "__main__":
    main()
