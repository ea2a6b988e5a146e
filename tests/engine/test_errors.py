"""What a person sees hides secrets and home, shows hidden characters, and suggests the near name."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import (
    Cancelled,
    ConfigUnreadable,
    DataError,
    UsageError,
    WorkbenchError,
    as_argument,
    nearest,
    redact,
    visible,
)
from engine.run import store

TOKENS = (
    "hf_" + "a1B2" * 9,
    "sk-" + "abcDEF123" * 4,
    "ghp_" + "Z9y8" * 9,
    "github_pat_" + "11ABCDEFG0" * 4,
    "glpat-" + "aB3" * 7,
    "xoxb-" + "123456789012-abcDEF",
    "AKIA" + "ABCDEFGHIJKLMNOP",
    "wandb_v1_" + "aB3" * 9,
)


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_never_appear(token: str) -> None:
    for text in (token, f"x {token} y", f"token={token}", f"Authorization: Bearer {token}"):
        assert token not in redact(text)
        assert "[hidden]" in redact(text)


def test_credentials_in_addresses_and_arguments_never_appear() -> None:
    assert redact("https://me:geheim@host/x") == "https://[hidden]@host/x"
    assert "geheim123" not in redact("password=geheim123&x=1")
    assert "geheim123" not in redact("https://host/?token=geheim123")


@pytest.mark.parametrize(
    "text",
    [
        "https://me:ge@heim@host/x",
        "https://abcdefghijklmnopqrstuvwxyz@host/x",
        "Authorization: Bearer geheim.geheim",
        "WANDB_API_KEY=geheimgeheim",
        "aws_secret_access_key: geheim/geheim+x",
        '{"hub_token": "geheimgeheim"}',
    ],
)
def test_secrets_are_known_by_their_place(text: str) -> None:
    shown = redact(text)
    assert "[hidden]" in shown
    assert "heim" not in shown
    assert "abcdefghij" not in shown


def test_errors_findings_and_their_fixes_hold_no_secret() -> None:
    from engine.config.findings import Fix, must

    address = "https://me:" + "geheim" * 30 + "@host/rows.jsonl"
    finding = must("data.train", "a file", address, "Name one.", fix=Fix("take it", {"data.train": address}))
    assert "geheim" not in str(finding.as_json())
    assert "geheim" not in WorkbenchError(address, address).full_message


def test_ordinary_text_stays() -> None:
    for text in ("hf_hub", "task-force", "skill", "https://host:80/a@b", "a token in a row"):
        assert redact(text) == text


def test_home_is_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/person")
    assert redact("/home/person/runs") == "~/runs"
    assert redact("in /home/person: no") == "in ~: no"
    assert redact("/home/personal") == "/home/personal"
    assert os.path.expanduser("~") == "/home/person"


@given(st.text())
def test_visible_text_has_no_control_or_hidden_characters(text: str) -> None:
    for lines in (False, True):
        shown = visible(text, lines=lines)
        for sign in shown:
            if lines and sign in "\n\t":
                continue
            assert ord(sign) >= 0x20
            assert not 0x7F <= ord(sign) <= 0x9F
            assert not 0x200B <= ord(sign) <= 0x200F
            assert not 0x202A <= ord(sign) <= 0x202E
            assert not 0xD800 <= ord(sign) <= 0xDFFF
        shown.encode("utf-8")


def test_escapes_become_pictures() -> None:
    assert visible("\x1b[31mred\x1b[0m\n") == "␛[31mred␛[0m␊"
    assert visible("a\u202eb") == "a\\u202eb"
    assert visible("a\nb\tc", lines=True) == "a\nb\tc"
    assert visible("ordinary äöü 日本 🙂") == "ordinary äöü 日本 🙂"


def test_nearest_suggests_or_keeps_quiet() -> None:
    assert nearest("lora_alfa", ["lora_alpha", "r"]) == "lora_alpha"
    assert nearest("qqqq", ["lora_alpha", "r"]) is None


def test_exit_codes_and_places() -> None:
    codes = {WorkbenchError: 1, UsageError: 2, ConfigUnreadable: 2, Cancelled: 130}
    assert {kind: kind("x").exit_code for kind in codes} == codes
    assert WorkbenchError("x", exit_code=7).exit_code == 7
    place = DataError("must be JSON", "mend it", path="a.jsonl", line=3, column=5)
    assert place.message == "a.jsonl:3:5: must be JSON"
    assert (place.hint, place.line) == ("mend it", 3)


@pytest.mark.parametrize(
    ("message", "hint", "told"),
    [
        ("rows.jsonl:2: row 1 is too long (97 tokens)", "Raise data.max_length.",
         "rows.jsonl:2: row 1 is too long (97 tokens). Raise data.max_length."),
        ("The disk is full.", "Free some space.", "The disk is full. Free some space."),
        ("run a-0001 is finished", "", "run a-0001 is finished"),
    ],
)  # fmt: skip
def test_message_and_hint_on_one_line_are_two_sentences(message: str, hint: str, told: str) -> None:
    assert WorkbenchError(message, hint).full_message == told


def test_a_notebook_shows_the_sentence_and_the_way_out_below_the_cell(capsys: pytest.CaptureFixture[str]) -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    shell.user_ns["fails"] = lambda: store.find("nowhere", "/")
    shell.run_cell("fails()")
    assert capsys.readouterr().out.splitlines() == [
        "RunNotFound: no run is called nowhere in /. `workbench runs` lists them; --runs, in a notebook runs=, names another "
        "folder."
    ]


def test_a_message_shows_no_home_directory_and_its_commands_still_name_the_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    told = WorkbenchError("/home/ada/my.yaml: is gone.", f"`workbench watch {as_argument('/home/ada/my runs/a-0001')}`")
    assert told.message == "~/my.yaml: is gone."
    assert told.hint == "`workbench watch ~/'my runs/a-0001'`"
    assert as_argument("/srv/my runs") == "'/srv/my runs'"
    assert as_argument("/home/adam/x") == "/home/adam/x"
