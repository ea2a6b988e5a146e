"""`workbench check`: everything wrong at once, with lines and fixes, without torch, quickly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engine.errors import ConfigUnreadable, UsageError, WorkbenchError
from workbench.cli.check import _placed, command

GOOD = "model:\n  name: builtin/tiny\n  dtype: float32\ndata:\n  train:\n    - path: builtin/dates\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), standalone_mode=False)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    place = tmp_path / "good.yaml"
    place.write_text(GOOD)
    return place


def test_a_good_config_exits_0(good: Path) -> None:
    result = run(str(good))
    assert result.return_value == 0
    assert "nothing wrong" in result.output


def test_all_findings_with_line_and_fix_exit_1(tmp_path: Path) -> None:
    place = tmp_path / "bad.yaml"
    place.write_text(GOOD + "optim:\n  learning_rte: 3e-4\n  max_steps: soon\nsequence_len: 9\n")
    result = run(str(place))
    assert result.return_value == 1
    assert "optim.learning_rte: must be a setting of optim" in result.output
    assert "(line 8)" in result.output
    assert "fix: rename to optim.learning_rate" in result.output
    assert "optim.max_steps: must be a whole number" in result.output
    assert "data.max_length" in result.output
    assert "3 errors" in result.output


def test_json_has_the_agreed_shape(tmp_path: Path) -> None:
    place = tmp_path / "bad.yaml"
    place.write_text(GOOD + "sequence_len: 9\n")
    result = run(str(place), "--json")
    found = json.loads(result.output)
    assert set(found) == {"ok", "findings", "data", "summary"}
    assert found["summary"].startswith("builtin/tiny (197 k parameters) is trained with SFT")
    assert found["data"]["truncated_share"] == {"value": None, "counted": None}
    assert found["ok"] is False
    assert [set(each) for each in found["findings"]] == [{"path", "severity", "rule", "message", "fix"}]
    assert found["findings"][0]["fix"] == {
        "label": "write it as data.max_length",
        "set": {"data.max_length": 9},
        "unset": ["sequence_len"],
    }
    assert result.return_value == 1


def test_a_name_that_is_no_file_is_not_passed_over_as_a_data_set_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for name in ("answers.jsonl", "rows/all.json"):
        (tmp_path / name).write_text(
            '[{"prompt": "a", "completion": "b"}]' if "all" in name else '{"prompt": "a", "completion": "b"}\n'
        )
    place = tmp_path / "my.yaml"
    for written, meant in (
        ("answers", "answers.jsonl"),
        ("anwsers.jsonl", "answers.jsonl"),
        ("rows/all", "rows/all.json"),
    ):
        place.write_text(GOOD.replace("builtin/dates", written))
        said = run(str(place)).output
        assert f"Did you mean {meant}?" in said, said
        assert f"(data.train.0.path: {meant})" in said
    place.write_text(GOOD.replace("builtin/dates", "imdb"))
    assert "imdb is no file or folder here, so it is taken for a data set on the hub" in run(str(place)).output
    place.write_text(GOOD.replace("builtin/dates", "someone/rows"))
    assert "on the hub" not in run(str(place)).output


def test_another_machine_is_judged_on_this_one(tmp_path: Path) -> None:
    place = tmp_path / "big.yaml"
    place.write_text("model:\n  name: Qwen/Qwen3-8B\ndata:\n  train: builtin/dates\n")
    small = run(str(place), "--for", "1xRTX4090-24GB")
    assert small.return_value == 1
    assert "this will not fit: needs" in small.output
    assert "the card has 23.6 GiB" in small.output
    large = run(str(place), "--for", "1xB200-192GB")
    assert "will not fit" not in large.output
    old = run(str(place), "--for", "T4")
    assert "model.dtype: must be float16 or float32 on T4" in old.output
    assert isinstance(run(str(place), "--for", "nonsense").exception, UsageError)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "train.0.path: must be a file"),
        ("", "empty"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"', "line 1"),
        (b"\xff\xfe\x00bad\n", "UTF-8"),
        ('{"foo": 1}\n', "fit no known format"),
        ('{"prompt": "a", "completion": "b"}\n{"text": "c"}\n', "line 2"),
        ('{"chosen": "a", "rejected": "b", "prompt": "c"}\n', "for dpo"),
    ],
)
def test_a_bad_data_file_is_one_sentence(content: str | bytes | None, words: str, tmp_path: Path) -> None:
    place = tmp_path / "my.yaml"
    place.write_text(GOOD.replace("builtin/dates", "rows.jsonl"))
    if content is not None:
        (tmp_path / "rows.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    result = run(str(place))
    assert result.return_value == 1, result.output
    assert words in result.output
    assert result.output.count("x error") == 1, result.output


def test_names_and_values_from_outside_reach_no_terminal_raw(tmp_path: Path) -> None:
    place = tmp_path / "x\x1b[31m.yaml"
    place.write_text(GOOD + 'run:\n  name: "\\e]0;title\\a/[red]"\n"\\e[2J": 1\n')
    result = run(str(place))
    assert "\x1b" not in result.output
    assert "\x07" not in result.output
    assert "[red]" in result.output


def test_an_unknown_model_folder_and_a_hub_name_differ(tmp_path: Path) -> None:
    place = tmp_path / "my.yaml"
    place.write_text(GOOD.replace("builtin/tiny", "./nowhere"))
    assert "model.name: must be a hub id, a folder with config.json" in run(str(place)).output
    place.write_text(GOOD.replace("builtin/tiny", "org/some-model"))
    result = run(str(place))
    assert "whether the hub has it is seen then" in result.output
    assert result.return_value == 0


def test_what_is_no_config_exits_2(tmp_path: Path) -> None:
    for content in ("a: [", "- x", "a: 1\na: 2"):
        (tmp_path / "bad.yaml").write_text(content)
        problem = run(str(tmp_path / "bad.yaml")).exception
        assert isinstance(problem, ConfigUnreadable)
        assert problem.exit_code == 2
    assert isinstance(run(str(tmp_path / "none.yaml")).exception, WorkbenchError)


def process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench", *arguments], capture_output=True, text=True, timeout=120, cwd=cwd
    )


def test_the_real_command_says_one_sentence_on_stderr(good: Path) -> None:
    done = process("check", "missing.yaml", cwd=good.parent)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: missing.yaml: must be a file that exists")
    assert "Traceback" not in done.stderr
    assert process("check", str(good), cwd=good.parent).returncode == 0


def test_without_data_nothing_heavy_is_imported(good: Path) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['workbench', 'check', {str(good)!r}]\n"
        "from workbench.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'trl', 'pandas', 'numpy', 'textual'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or None)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_help_imports_no_pydantic() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['workbench', '--help']\n"
        "from workbench.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "sys.exit(', '.join({'pydantic', 'ruamel', 'textual', 'torch'} & set(sys.modules)) or None)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("problem", "place"),
    [("model.name: the tokenizer is neither here nor there.", "model.name"), ("/rows.jsonl:2: not JSON.", "data")],
)
def test_a_problem_of_the_rows_is_placed_once(problem: str, place: str) -> None:
    assert _placed(problem) == (place, problem.removeprefix(f"{place}: "))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "code", "words"),
    [("error", 1, "rows.jsonl:2"), ("truncate", 0, "1 of 2 rows is longer than max_length 64 and will be cut")],
)
def test_with_data_the_rows_are_counted_by_the_inspector(policy: str, code: int, words: str, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a " * n}, {"role": "assistant", "content": "b " * n}]}
        for n in (3, 50)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place = tmp_path / "my.yaml"
    place.write_text(GOOD.replace("builtin/dates", "rows.jsonl") + f"  max_length: 64\n  excess_length: {policy}\n")
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "check", str(place), "--data"],
        capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout


def test_settings_beside_the_file_are_judged_as_train_takes_them(good: Path) -> None:
    before = good.read_text()
    here = Path("here.jsonl")
    here.write_text('{"prompt": "a", "completion": "b"}\n')
    assert run(str(good), "optim.learning_rate=1e-4", "data.train.0.path=here.jsonl").return_value == 0
    less = run(str(good), "optim.max_steps=2")
    assert "The settings beside the file change: " in less.output
    assert "steps −" in less.output
    assert "settings beside the file" not in run(str(good)).output
    good.write_text(before + "  max_length: 8\n")
    other = run(str(good), f"data.train.0.path={here}", "data.max_length=64", "--data").output
    assert "settings beside the file change" in other
    assert "rows too long" not in other, "the file's own rows were not counted, and these are others"
    good.write_text(before)
    few = here.with_name("few.jsonl")
    few.write_text('{"prompt": "few", "completion": "rows"}\n')
    good.write_text(before.replace("builtin/dates", str(few.absolute())))
    same = run(str(good), f"data.train.0.path={here}", "--data").output
    assert "memory" not in same.partition("beside the file")[2], "that one of them was counted changes nothing"
    good.write_text(before)
    here.unlink()
    wrong = run(str(good), "optim.learning_rte=1e-4", "data.train.0.path=here.jsonl")
    assert wrong.return_value == 1
    assert "optim.learning_rte: must be a setting of optim" in wrong.output
    assert "data.train.0.path: must be a file, folder or data set that exists" in wrong.output
    assert "data.max_length" in run(str(good), "max_length=9").output, "a setting without its section is found one"
    mended = run(str(good), "model.dtype=float33")
    assert "model.dtype" in mended.output
    assert "(line" not in mended.output, "what was given beside the file stands in none of its lines"
    assert good.read_text() == before


@pytest.mark.parametrize("wrong", ["other.yaml", "optim..x=1", "=3"])
def test_what_is_no_setting_beside_the_file_is_refused_in_one_sentence(good: Path, wrong: str) -> None:
    problem = run(str(good), wrong).exception
    assert isinstance(problem, UsageError)
    assert problem.message.startswith(f"{wrong}: must be of the form section.setting=value")
