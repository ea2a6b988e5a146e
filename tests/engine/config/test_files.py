"""Config files: read within safe limits, refused in one sentence, written complete."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.config.files import absolute, as_yaml, dump, load, named_places, overrides, parse, put
from engine.config.recipes import recipes
from engine.config.tree import fields
from engine.errors import ConfigUnreadable, UsageError
from engine.planning.auto import resolved
from engine.rules import read

FAN = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "python tag": ("a: !!python/object/apply:os.system ['true']\n", "tag"),
    "own tag": ("a: !thing x\n", "tag"),
    "depth 65": ("a: " + "[" * 65 + "]" * 65 + "\n", "64 levels"),
    "depth 500": ("[" * 500, "64 levels"),
    "depth 5000": ("a: " + "{a: " * 5000, "64 levels"),
    "depth 100000": ("[" * 100_000, "64 levels"),
    "nested blocks": ("\n".join("  " * level + "a:" for level in range(200)), "64 levels"),
    "alias bomb": (FAN, "aliases"),
    "alias of itself": ("a: &a [*a]\n", "anchor"),
    "too large": ("# " + "x" * (1024 * 1024) + "\n", "1 MiB"),
    "too many lines": ("\n".join(f"k{number}: {number}" for number in range(20_000)), "values"),
    "too many values by aliases": (f"a: &a [{'1,' * 90}]\nb: [{'*a,' * 50}]\n", "into a data file"),
    "too many items": ("a: [" + "1," * 200_000 + "]", "values"),
    "same key twice": ("model:\n  name: a\n  name: b\n", "line 2 and again on line 3"),
    "tab": ("model:\n\tname: a\n", "spaces"),
    "open bracket": ("a: [1\n", "YAML"),
    "open quote": ("a: 'x\n", "YAML"),
    "colon": ("a: b: c\n", "colon"),
    "list": ("- a\n- b\n", "a list. Start from a recipe"),
    "text": ("hello\n", "text"),
    "list that is not closed": (
        "a: [b\n",
        "cannot be read there: expected ',' or ']', but got the end of the file. Check",
    ),
    "two documents": ("a: 1\n---\nb: 2\n", "second one after `---`. Keep one"),
    "merge key": ("a: &a {b: 1}\nc:\n  <<: *a\n", "merge"),
    "long number": ("a: " + "9" * 5000, "of 5,000. Shorten it"),
    "key that is a list": ("? [1, 2]\n: 3\n", "names as keys; got a list or a mapping as a key. Quote it"),
    "control character": (
        "a: 1\nb: \x07\n",
        ":2: must be text that can be printed; got the character \u2407. Remove it, or write it as \\x07",
    ),
    "control character behind a byte order mark": ("\ufeffa: 1\n\x1b\n", ":2: must be text that can be printed"),
    "a name with a star": (
        "data:\n  train: *.jsonl\n",
        "got *.jsonl. Put &.jsonl before a value above it, or put the text in quotes",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_or_broken_file_is_one_sentence_in_time(name: str, tmp_path: Path) -> None:
    text, words = HOSTILE[name]
    place = tmp_path / "bad.yaml"
    place.write_text(text)
    parse("warm: up")
    started = time.process_time()
    with pytest.raises(ConfigUnreadable) as caught:
        load(place)
    assert time.process_time() - started < 0.4  # 0.2 s on a quiet machine
    assert words in caught.value.message
    assert "bad.yaml" in caught.value.message
    assert "\n" not in caught.value.message
    assert "\x07" not in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("kind", ["missing", "folder", "binary", "latin-1"])
def test_what_cannot_be_opened_says_so(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "x.yaml"
    if kind == "folder":
        place.mkdir()
    elif kind == "binary":
        place.write_bytes(bytes(range(256)))
    elif kind == "latin-1":
        place.write_bytes("a: 1\nname: Jürgen\n".encode("latin-1"))
    with pytest.raises(ConfigUnreadable) as caught:
        load(place)
    assert "x.yaml" in caught.value.message
    if kind == "latin-1":
        assert "x.yaml:2: must be UTF-8" in caught.value.message


def test_a_file_without_permission_says_so(own_folder: Path) -> None:
    place = own_folder / "x.yaml"
    place.write_text("a: 1")
    place.chmod(0)
    with pytest.raises(ConfigUnreadable, match="cannot be read"):
        load(place)


@pytest.mark.parametrize(
    "text",
    ["\ufeffversion: 1\nrun:\n  seed: 3\n", "version: 1\r\nrun:\r\n  seed: 3\r\n", "{version: 1, run: {seed: 3}}"],
)
def test_byte_order_mark_line_ends_and_brackets_are_read(text: str) -> None:
    document = parse(text)
    assert document.mapping == {"version": 1, "run": {"seed": 3}}
    assert document.text() == text


def test_scalars_are_those_of_yaml_1_2() -> None:
    mapping = parse("a: 3e-4\nb: no\nc: 2021-03-03\nd: 0x1F\ne: ~\nf: 010\ng: true\nh: '1'\ni: 1_000\nj: on\n").mapping
    assert mapping == {
        "a": 3e-4,
        "b": "no",
        "c": "2021-03-03",
        "d": 31,
        "e": None,
        "f": 10,
        "g": True,
        "h": "1",
        "i": 1000,
        "j": "on",
    }


def test_lines_are_known_for_every_key() -> None:
    document = parse("# first\nmodel:\n  name: x\ndata:\n  train:\n    - path: a\n    - path: b\n")
    assert document.lines["model.name"] == 3
    assert document.lines["data.train.1.path"] == 7


@pytest.mark.parametrize("recipe", [each.name for each in recipes()])
def test_the_stored_config_is_complete_resolved_and_reads_the_same(recipe: str) -> None:
    config = resolved(read(parse({each.name: each for each in recipes()}[recipe].text).mapping).config)
    text = dump(config)
    assert ": auto" not in text
    again = read(parse(text).mapping)
    assert [finding for finding in again.findings if finding.severity == "error"] == []
    assert dump(again.config) == text
    assert again.config.model_dump() == config.model_dump()


def test_overrides_are_typed_as_in_the_file() -> None:
    before = {"optim": {"learning_rate": 1}}
    after = overrides(
        before, ["optim.learning_rate=1e-4", "run.prompts=[a, b]", "data.train.0.path=x.jsonl", "run.name=null"]
    )
    assert after == {
        "optim": {"learning_rate": 1e-4},
        "run": {"prompts": ["a", "b"], "name": None},
        "data": {"train": [{"path": "x.jsonl"}]},
    }
    assert before == {"optim": {"learning_rate": 1}}
    assert overrides({}, ["max_length=9"]) == {"max_length": 9}, "left for reading to name its section"
    for bad in ("optim.learning_rate", "=3", "a b=3", "a..b=1"):
        with pytest.raises(UsageError, match=r"section\.setting=value"):
            overrides({}, [bad])


def test_relative_paths_start_at_the_configs_folder(tmp_path: Path) -> None:
    (tmp_path / "local-model").mkdir()
    mapping = {
        "model": {"name": "local-model", "tokenizer": "gpt2", "chat_template": "mine.jinja"},
        "data": {"train": [{"path": "a.jsonl"}, {"path": "builtin/dates"}, {"path": "org/rows"}], "eval": "b.csv"},
        "run": {"output_dir": "out"},
    }
    found = absolute(mapping, tmp_path)
    assert found["model"] == {
        "name": str(tmp_path / "local-model"),
        "tokenizer": "gpt2",
        "chat_template": str(tmp_path / "mine.jinja"),
    }
    assert [entry["path"] for entry in found["data"]["train"]] == [
        str(tmp_path / "a.jsonl"),
        "builtin/dates",
        "org/rows",
    ]
    assert found["data"]["eval"] == [{"path": str(tmp_path / "b.csv")}]
    assert found["run"]["output_dir"] == str(tmp_path / "out")
    assert mapping["model"]["name"] == "local-model"


def test_put_makes_what_is_missing_on_the_way() -> None:
    mapping: dict[str, object] = {"method": "dpo"}
    put(mapping, "method.kind", "dpo")
    put(mapping, "data.train.0.path", "a")
    assert mapping == {"method": {"kind": "dpo"}, "data": {"train": [{"path": "a"}]}}


def test_yaml_out_is_yaml_in() -> None:
    value = {"a": "no", "b": "1e-4", "c": ["x: y", "# z", "multi\nline", ""], "d": {"e": None, "f": 1e-5, "g": True}}
    assert parse(as_yaml(value)).mapping == value


def test_an_adapter_is_a_place_on_disk_also_where_nothing_is(tmp_path: Path) -> None:
    """A name that the working directory lacks is not looked for beside the file."""
    found = absolute({"adapter": {"path": "org/gone"}, "model": {"name": "org/gone"}}, tmp_path)
    assert (found["adapter"]["path"], found["model"]["name"]) == (str(tmp_path / "org/gone"), "org/gone")


def test_files_and_models_named_in_rewards_become_absolute(tmp_path: Path) -> None:
    (tmp_path / "judge").mkdir()
    texts = ["0.5 * mine.py:score", "json_schema:form.json", "model:judge", "model:org/judge", "exact_match", "no such"]
    found = absolute({"method": {"kind": "grpo", "reward_funcs": texts}}, tmp_path)["method"]["reward_funcs"]
    assert found == [
        f"0.5 * {tmp_path}/mine.py:score",
        f"json_schema:{tmp_path}/form.json",
        f"model:{tmp_path}/judge",
        "model:org/judge",
        "exact_match",
        "no such",
    ]


def test_every_place_that_a_config_can_name_is_told() -> None:
    mapping = {
        "model": {"name": "a/b", "tokenizer": "./t", "chat_template": "x.jinja"},
        "adapter": {"path": "old"},
        "data": {"train": ["one.jsonl", {"path": "two.jsonl", "chat_template": "y.jinja"}, 3], "eval": "three.jsonl"},
        "method": {"reward_funcs": ["0.5 * r.py:f", "model:judge", "json_schema:s.json", "length:64", "no reward", 1]},
        "run": {"output_dir": "out", "name": "no place"},
    }
    found = named_places(mapping)
    assert {path for path, _ in found} == {
        "model.name", "model.tokenizer", "model.chat_template", "adapter.path", "data.train", "data.eval",
        "method.reward_funcs", "run.output_dir",
    }  # fmt: skip
    assert {text for _, text in found} == {
        "a/b", "./t", "x.jinja", "old", "one.jsonl", "two.jsonl", "y.jinja", "three.jsonl", "r.py", "judge", "s.json", "out",
    }  # fmt: skip
    paths = {spec.path for spec in fields if spec.control == "path"}
    everything: dict[str, dict[str, str]] = {}
    for path in paths:
        section, _, name = path.partition(".")
        everything.setdefault(section, {})[name] = path
    assert {path for path, _ in named_places(everything)} == paths
