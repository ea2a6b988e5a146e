"""A reward's file is read, not run: what it lacks is told before a model is loaded, and what only running tells is left to the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.data.gather_facts import completed, gather_facts
from engine.facts.reward_files import function_flaw
from engine.rules import read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def score(completions): ...", ""),
        ("score = lambda completions: [0.0]", ""),
        ("async def score(completions): ...", ""),
        ("from other import score", ""),
        ("from other import *", ""),
        ("for name in ('score',): globals()[name] = len", ""),
        ("if True:\n    def score(completions): ...", ""),
        ("class score: ...", ""),
        ("def scor(completions): ...", "mine.py has no function score. Did you mean scor?"),
        ("def other(completions): ...\ndef more(): ...", "mine.py has no function score. It has other, more."),
        ("import os\n", "mine.py has no function score. It has no function."),
        (
            "def score(completions)\n    return 1",
            "mine.py, line 1: Python cannot read it: expected ':'. Mend the file.",
        ),
        ("raise SystemExit\ndef score(completions): ...", ""),
    ],
)
def test_a_function_is_told_from_the_text_of_its_file(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert function_flaw(tmp_path / "mine.py", "score") == said


def test_it_is_an_error_of_the_config_until_the_file_is_mended_also_where_all_else_is_known(tmp_path: Path) -> None:
    mapping = {
        "model": {"name": "builtin/tiny"},
        "data": {"train": [{"path": "builtin/dates"}]},
        "method": {"kind": "grpo", "reward_funcs": ["0.5 * mine.py:score"]},
    }
    (tmp_path / "mine.py").write_text("def scores(completions): ...")
    known = gather_facts(read(mapping).config, tmp_path)
    (flaw,) = [each for each in read(mapping, known).errors if each.path.startswith("method.reward_funcs")]
    assert flaw.path == "method.reward_funcs.0"
    assert flaw.message.endswith("mine.py has no function score. Did you mean scores?")
    (tmp_path / "mine.py").write_text("def score(completions): ...")
    later = completed(known, read(mapping).config, tmp_path)
    assert not [each for each in read(mapping, later).errors if each.path.startswith("method.reward_funcs")]
