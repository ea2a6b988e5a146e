"""Rows as they are asked for and told: how often a question goes out, and the words beside a row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.session.draft import Draft
from engine.session.rows import ASK_SECONDS, RowQuestion, length_text, trained_text, why_none


def test_the_first_question_goes_out_at_once_and_the_next_one_a_moment_later() -> None:
    asked: list[dict[str, Any]] = []

    def ask(do: str, **params: Any) -> Any:
        asked.append(params["rows"])
        return SimpleNamespace(done=False, cancel=lambda: None, add_done_callback=lambda done: None)

    question = RowQuestion(Draft.new("demo"), ask)
    for index in range(3):
        rest = question.put({"kind": "index", "index": index}, "reading")
        assert rest == 0.0 if index == 0 else 0.0 < rest <= ASK_SECONDS
        if index != 1:  # a newer one takes its place before its turn comes
            question.send()
    assert [rows["index"] for rows in asked] == [0, 2]
    question.send()
    assert len(asked) == 2, "what was sent is not sent again"


def token(trained: bool) -> dict[str, Any]:
    return {"trained": trained}


def test_the_longest_side_of_a_pair_is_told_where_it_is_shorter_than_all() -> None:
    prompt, chosen, rejected = [token(False)], [token(True)], [token(True), token(True)]
    pair = {"parts": {"prompt": prompt, "chosen": chosen, "rejected": rejected}, "length": 3}
    assert trained_text(pair) == "4 tokens (longest side 3), 3 trained (75 %)"
    shared = {"parts": {"chosen": prompt + chosen, "rejected": prompt + rejected}, "length": 3}
    assert length_text(shared) == "4 tokens (longest side 3)", "the tokens of the prompt count once"
    assert length_text({"parts": {"input": prompt}, "length": 1}) == "1 tokens"


def test_why_no_row_is_shown() -> None:
    assert why_none({"kind": "search", "text": "cat"}) == "No row holds 'cat'."
    assert why_none({"kind": "search", "text": "cat", "start": 4}) == "No further row holds 'cat'."
    assert why_none({"kind": "worst", "by": "masked"}) == "Every row has something to learn."
    assert why_none({"kind": "worst", "by": "truncated"}) == "No row is cut."
    assert why_none({"kind": "index", "index": 9}) == "There is no such row."
