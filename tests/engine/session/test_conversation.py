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


def test_a_row_of_messages_says_of_each_answer_that_was_cut_that_nothing_is_learned_of_it() -> None:
    chat = conversation()
    chat.turns[0].answers[0].ended = "stopped"
    tuned, base = chat.rows()
    assert [message.get("train") for message in tuned["messages"]] == [None, None, False, None, None]
    assert [message.get("train") for message in base["messages"]] == [None, None, False]
    assert (tuned["model"], base["model"]) == ("tuned", "base")


def test_below_an_answer_stand_its_tokens_its_speed_and_why_it_ended() -> None:
    assert [Answer(tokens=tokens).note() for tokens in (0, 3)] == ["waiting", "3 tokens"]
    ended = Answer(tokens=10, done=True, ended="length", result={"seconds": 0.5})
    assert ended.note() == "10 tokens, 20/s  stopped at max_new_tokens"
    assert Answer(tokens=1, done=True, ended="stop", result={"seconds": 0}).note() == "1 token"
