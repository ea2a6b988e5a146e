"""The chat in a notebook: the same session behind messages, and nothing left when the view goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

from tests.chats import QUESTION, make_run
from widgets import Chat, Monitor


def ask(face: Any, do: str, **params: Any) -> dict[str, Any]:
    answer = face.answer({"id": "1", "do": do, **params}).data
    assert answer["ok"], answer
    return dict(answer)


def test_a_chat_answers_in_messages_and_its_process_goes_with_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    face = Chat(run, device="cpu", max_new_tokens=6)
    ask(face, "chat_open")
    end = time.monotonic() + 240
    while (now := ask(face, "chat"))["state"] == "loading":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert now["state"] == "ready", now["problem"]
    assert now["titles"] == [f"{run.id} checkpoint 10", "base builtin/tiny"]
    assert ask(face, "chat_set", name="max_new_tokens", value="4")["settings"]["max_new_tokens"] == "4"
    refused = face.answer({"id": "1", "do": "chat_set", "name": "top_p", "value": "2"}).data
    assert not refused["ok"]
    assert refused["error"].startswith("top_p: must be")
    ask(face, "chat_say", text=QUESTION)
    while (now := ask(face, "chat"))["state"] == "answering":
        time.sleep(0.02)
    (turn,) = now["turns"]
    assert turn["prompt"] == QUESTION
    assert [answer["done"] for answer in turn["answers"]] == [True, True]
    assert "turns" not in ask(face, "chat", version=now["version"])
    assert ask(face, "chat_prompt")["prompts"][0]["text"].endswith("<|im_start|>assistant\n")
    assert ask(face, "chat_save", path=str(tmp_path / "rows.jsonl"))["rows"] == 2
    pid = face.session.pid
    ask(face, "chat_leave", run="another-0001")
    assert psutil.pid_exists(pid)
    ask(face, "chat_leave")
    end = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)
    ask(face, "chat_open")
    again = ask(face, "chat")
    assert (again["state"], again["turns"]) == ("loading", [turn])
    loading = face.dispatcher.parts[0]._open.pid  # whose child it is depends on what starts the tests' processes
    assert loading not in (None, pid)
    face.close()
    end = time.monotonic() + 10
    while psutil.pid_exists(loading) and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(loading)


def test_a_monitor_opens_a_chat_of_its_run_alone(tmp_path: Path) -> None:
    empty = make_run(tmp_path / "runs", steps=())
    face = Monitor(empty)
    refused = face.answer({"id": "1", "do": "chat_open", "run": empty.id}).data
    assert "no whole checkpoint to talk to" in refused["error"]
    refused = face.answer({"id": "1", "do": "chat_open", "run": "../elsewhere"}).data
    assert "no run is called" in refused["error"]
    refused = face.answer({"id": "1", "do": "chat"}).data
    assert refused["error"] == "No chat is open."
    face.close()
