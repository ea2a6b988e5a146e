"""How much later the first token of a chat comes than that of transformers' own `generate`, in pairs on this machine.

`python -m benchmarks.chat_first_token RUN [PAIRS]`: each pair asks the chat's process and calls `generate` here, in turns of
changing order, with the same model, prompt and threads. Prints the medians and the median of the differences with its
95 % interval (bootstrap), in milliseconds.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import threading
import time
from typing import Any

import torch

from engine.chat.models import load_sides
from engine.run.store import RunFolder
from engine.session.chat import ChatSession, who_answers

PROMPT = "What is 3 March 2021 in ISO form?"


def first_of_chat(session: ChatSession) -> float:
    """Seconds from asking to the first token, through the pipe."""
    came = threading.Event()
    at: list[float] = []

    def hear(_: dict[str, Any]) -> None:
        at.append(time.perf_counter())
        came.set()

    began = time.perf_counter()
    messages = [{"role": "user", "content": PROMPT}]
    ticket = session._client.ask("answer", on_progress=hear, side=0, messages=messages, sampling={"max_new_tokens": 1})
    ticket.result(60)
    came.wait(60)
    return at[0] - began


def first_of_generate(side: Any) -> float:
    """Seconds from the text to the first token, here: rendered, tokenized and generated."""
    began = time.perf_counter()
    text = side.chat.render([{"role": "user", "content": PROMPT}], prompt=True)
    ids = side.tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad(), side.active() as model:
        model.generate(**ids, do_sample=False, max_new_tokens=1, eos_token_id=side.stops, pad_token_id=0)
    return time.perf_counter() - began


def main(place: str, pairs: int) -> None:
    """Measure and print."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    run = RunFolder(place)
    with ChatSession(who_answers([run], only="tuned"), device="cpu") as session:
        session.load().result(300)
        (side,) = load_sides([{"title": "here", "run": place, "checkpoint": session.who[0].checkpoint}], lambda _: None)
        times: list[tuple[float, float]] = []
        for number in range(-5, pairs):
            if number % 2:
                one, other = first_of_chat(session), first_of_generate(side)
            else:
                other, one = first_of_generate(side), first_of_chat(session)
            if number >= 0:
                times.append((one * 1000, other * 1000))
    more = [one - other for one, other in times]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(more, k=len(more))) for _ in range(2000))
    chat, here = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"chat {chat:.1f} ms, generate {here:.1f} ms, {pairs} pairs")
    print(f"later by {statistics.median(more):+.1f} ms (95 %: {medians[50]:+.1f} to {medians[1949]:+.1f})")


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
