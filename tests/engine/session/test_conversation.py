"""What each side of a chat reads next: the conversation, or with no chat template the newest text alone."""

from __future__ import annotations

import pytest

from engine.errors import UsageError
from engine.session.conversation import Answer, Conversation, Settings, Turn


def conversation() -> Conversation:
    cut = Answer("It is", done=True, ended="length")
    turns = [
        Turn("What is it?", [Answer("A cat.", done=True, ended="stop"), cut]),
        Turn("And this?", [Answer("A dog.", done=True, ended="stop"), Answer(done=True, problem="out of memory")]),
    ]
    return Conversation("text", ["tuned", "base"], Settings(system="Be short."), [], turns)


def test_each_side_reads_what_it_has_said_itself_but_nothing_that_failed() -> None:
    chat = conversation()
    said = [[turn["content"] for turn in chat.messages(side)] for side in (0, 1)]
    assert said == [
        ["Be short.", "What is it?", "A cat.", "And this?", "A dog."],
        ["Be short.", "What is it?", "It is", "And this?"],
    ]
    assert [turn["content"] for turn in chat.messages(0, upto=1)] == ["Be short.", "What is it?", "A cat."]
    chat.has_template = False
    assert [turn["content"] for turn in chat.messages(0)] == ["Be short.", "And this?", "A dog."]


def test_rows_without_a_template_are_prompts_and_completions_that_the_model_ended() -> None:
    chat = conversation()
    chat.has_template = False
    assert chat.rows() == [
        {"prompt": "What is it?", "completion": "A cat.", "model": "tuned"},
        {"prompt": "And this?", "completion": "A dog.", "model": "tuned"},
    ]


def test_what_the_next_text_is_follows_from_what_was_said() -> None:
    scores = Conversation("score", ["tuned"], Settings(), [])
    assert (scores.wants, scores.subject) == ("prompt", "")
    scores.texts.append("2 + 2?")
    assert (scores.wants, scores.subject) == ("answer", "2 + 2?")
    with pytest.raises(UsageError, match="no rows to train on"):
        scores.rows()
