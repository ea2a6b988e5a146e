"""The answering process, as a real process: previews, counts, limits, cancelling, and that it never outlives its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client import COMMAND, Inspector
from engine.errors import Cancelled, WorkbenchError
from tests.caches import own_cache
from tests.prestarted import prestarted


@pytest.fixture(scope="module")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inspector]:
    os.environ["WORKBENCH_CACHE"] = own_cache(tmp_path_factory.mktemp("cache"))
    with Inspector() as inspector:
        yield inspector
    del os.environ["WORKBENCH_CACHE"]


@pytest.fixture
def config(shared_data: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(rows: Any, *, method: str = "sft", model: Any = None, **data: Any) -> dict[str, Any]:
        path = rows
        if isinstance(rows, list):
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return {
            "version": 1,
            "model": {
                "name": str(shared_data / "weights/tinystories-llama-260k"),
                "tokenizer": str(shared_data / "tokenizers/minimind"),
                **(model or {}),
            },
            "method": {"kind": method},
            "data": {"train": [{"path": str(path)}], **data},
        }

    return make


def _chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _text(part: list[dict[str, Any]], *, trained: bool | None = None) -> str:
    return "".join(token["text"] for token in part if trained is None or token["trained"] is trained)


def test_hello_at_lowest_priority_with_one_thread(inspector: Inspector) -> None:
    answer = inspector.ask("hello").result(30)
    assert answer["nice"] == 19
    environment = psutil.Process(answer["pid"]).environ()
    assert (environment["OMP_WAIT_POLICY"], environment["OMP_NUM_THREADS"]) == ("PASSIVE", "1")
    assert environment["PYTHONSAFEPATH"] == "1"


def test_raw_rows_come_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prestarted.COLD, "1")  # a forked one has torch from the start
    path = tmp_path / "r.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two"}\n', "utf-8")
    with Inspector() as fresh:
        answer = fresh.ask("rows", path=str(path), count=5).result(30)
        assert [(row["index"], row["line"], row["text"]) for row in answer["rows"]] == [
            (0, 1, '{"text": "one"}'),
            (1, 3, '{"text": "two"}'),
        ]
        pid = fresh.ask("hello").result(30)["pid"]
        maps = Path(f"/proc/{pid}/maps").read_text("utf-8")
        assert "libtorch" not in maps


def test_a_preview_shows_the_trained_tokens(inspector: Inspector, config: Any) -> None:
    rows = [_chat("Was ist das? 日本 🙂", "Ein Bild: 🙂👩‍👩‍👧"), _chat("b", "second")]
    found = inspector.ask("preview", config=config(rows), rows={"kind": "index", "index": 0}, count=5).result(120)
    assert (found["method"], found["total"], len(found["rows"])) == ("sft", 2, 2)
    first = found["rows"][0]
    assert _text(first["parts"]["input"], trained=True) == "Ein Bild: 🙂👩‍👩‍👧<|im_end|>"
    assert _text(first["parts"]["input"]).startswith("<|im_start|>user\nWas ist das? 日本 🙂<|im_end|>\n")
    assert set(first["parts"]["input"][0]) == {"id", "text", "trained"}
    assert [turn["role"] for turn in first["turns"]] == ["user", "assistant"]
    assert first["truncated"] is False
    assert found["sources"][0]["format"] == "messages"
    assert len(found["fingerprint"]) == 16
    # What is true of all rows is computed once and told again; with other rows in the file it is another.
    again = inspector.ask("preview", config=config(rows), rows={"kind": "index", "index": 1}).result(120)
    assert (again["fingerprint"], again["warnings"]) == (found["fingerprint"], found["warnings"])
    other = inspector.ask("preview", config=config([_chat("b", "third"), *rows]), rows={"kind": "index", "index": 1})
    assert other.result(120)["fingerprint"] not in ("", found["fingerprint"])


def test_preference_packs_and_cuts_are_shown(inspector: Inspector, config: Any, shared_data: Path) -> None:
    pairs = config(shared_data / "gsm8k/preference_pairs.jsonl", method="dpo")
    row = inspector.ask("preview", config=pairs, rows={"kind": "index", "index": 3}).result(120)["rows"][0]
    source = json.loads((shared_data / "gsm8k/preference_pairs.jsonl").read_text("utf-8").splitlines()[3])
    assert _text(row["parts"]["chosen"]).startswith(source["chosen"].strip())
    assert _text(row["parts"]["rejected"]).startswith(source["rejected"].strip())
    assert source["prompt"] in _text(row["parts"]["prompt"])
    assert not any(token["trained"] for token in row["parts"]["prompt"])

    packed = config([_chat(f"q{n}", f"answer {n}") for n in range(20)], packing=True, max_length=64)
    packed["data"]["packing_cross_doc_attn_mask"] = True
    pack = inspector.ask("preview", config=packed).result(120)["rows"][0]
    assert pack["separate"]
    assert sum(pack["documents"]) == len(pack["positions"]) == len(pack["parts"]["input"])
    starts = [place for place, position in enumerate(pack["positions"]) if position == 0]
    assert len(starts) == len(pack["documents"]) == len(pack["source_rows"])
    assert all(pack["parts"]["input"][start]["text"] == "<|im_start|>" for start in starts)

    cut = config([_chat("long?", "word " * 100)], max_length=40, excess_length="truncate")
    shown = inspector.ask("preview", config=cut).result(120)["rows"][0]
    assert shown["truncated"]
    assert len(shown["parts"]["input"]) == 40
    assert shown["length"] > 40


def test_worst_random_and_search(inspector: Inspector, config: Any) -> None:
    rows = [_chat(f"question {n}", "x" * (1 + n % 7)) for n in range(60)]
    rows[33] = _chat("the longest", "many words " * 30)
    rows[44] = {"messages": [{"role": "user", "content": "Nobody answers"}]}
    made = config(rows)
    ask = lambda **wanted: inspector.ask("preview", config=made, rows=wanted, count=2).result(120)["rows"]  # noqa: E731
    assert ask(kind="worst", by="longest")[0]["index"] == 33
    masked = ask(kind="worst", by="masked")
    assert [row["index"] for row in masked] == [44]
    assert masked[0]["left_out"] == "nothing in it is learned"
    assert ask(kind="search", text="NOBODY")[0]["index"] == 44
    assert ask(kind="random", seed=5) == ask(kind="random", seed=5)


def test_the_counts_come_with_progress(inspector: Inspector, config: Any, shared_data: Path) -> None:
    made = config(shared_data / "llama-factory/alpaca_en_demo.json")
    seen: list[Any] = []
    facts = inspector.ask("data", on_progress=seen.append, config=made).result(120)
    assert (facts["rows"], facts["exact"], facts["cached"]) == (999, True, False)
    assert seen[-1] == {"what": "tokenizing", "done": 999, "total": 999, "unit": "rows"}
    assert inspector.ask("data", config=made).result(120)["cached"]


def test_what_is_known_of_a_model(inspector: Inspector, shared_data: Path) -> None:
    answer = inspector.ask("model", name=str(shared_data / "tokenizers/minimind")).result(60)
    assert answer["tokenizer"]["eos_token"] == "<|im_end|>"
    assert answer["tokenizer"]["exact_masks"]
    assert "<|im_start|>" in answer["template"]["text"]


def test_the_estimate_by_formula(inspector: Inspector, config: Any) -> None:
    answer = inspector.ask("estimate", config=config([_chat("a", "b")])).result(60)
    assert answer["effective_batch"] >= 1
    assert answer["total_parameters"] > 200_000


PROBLEMS = [
    ({"model": {"tokenizer": "./nowhere"}}, "there is no folder"),
    ({"data": {"train": [{"path": "/nowhere/rows.jsonl"}]}}, "/nowhere/rows.jsonl: no such file"),
    ({"data": {"train": []}}, "data.train"),
    ({"data": {"max_length": "many"}}, "data.max_length: must be"),
    ({"model": {"chat_template": "chatlm"}}, "model.chat_template: .*chatlm"),
]


@pytest.mark.parametrize(("change", "sentence"), PROBLEMS)
def test_an_error_belongs_to_its_question_and_is_one_sentence(
    inspector: Inspector, config: Any, change: Any, sentence: str
) -> None:
    made = config([_chat("a", "b")])
    for section, values in change.items():
        made[section] = {**made[section], **values}
    with pytest.raises(WorkbenchError, match=sentence) as caught:
        inspector.ask("preview", config=made, base="/").result(120)
    assert "\n" not in caught.value.message
    assert "Traceback" not in caught.value.message
    assert inspector.ask("hello").result(30)


def test_bad_rows_are_shown_as_such_among_good_ones(inspector: Inspector, config: Any) -> None:
    rows = [_chat("a", "b"), {"messages": 7}, _chat("c", "d")]
    made = config(rows, on_bad_row="skip")
    found = inspector.ask("preview", config=made, count=3).result(60)["rows"]
    assert [bool(row.get("error")) for row in found] == [False, True, False]
    assert "rows.jsonl:2: row 1: column messages must hold a list of messages" in found[1]["error"]


def test_a_hostile_template_is_stopped_and_the_inspector_lives(
    inspector: Inspector, config: Any, tmp_path: Path
) -> None:
    for number, (text, sentence) in enumerate(
        [
            ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "longer than 2 seconds"),
            ("{{ 'a' * 10 ** 11 }}", "too much memory"),
            ("{{ lipsum.__globals__['os'].popen('id').read() }}", "may not do|does not accept"),
        ]
    ):
        file = tmp_path / f"evil{number}.jinja"
        file.write_text(text)
        made = config([_chat("a", "b")], model={"chat_template": str(file)})
        before = time.monotonic()
        row = inspector.ask("preview", config=made).result(60)["rows"][0]
        assert any(part in row["error"] for part in sentence.split("|")), row["error"]
        assert time.monotonic() - before < 40  # two renderings of at most two seconds, on a busy machine
    assert inspector.ask("hello").result(30)


def test_cancelling_kills_the_job(inspector: Inspector, config: Any) -> None:
    made = config([_chat(f"question {n}", "answer " * 50) for n in range(20_000)])
    started: list[Any] = []
    ticket = inspector.ask("data", on_progress=started.append, config=made)
    deadline = time.monotonic() + 60
    while not started and time.monotonic() < deadline:
        time.sleep(0.02)
    assert started
    pid = inspector.pid
    children = psutil.Process(pid).children()
    assert children
    before = time.monotonic()
    ticket.cancel()
    with pytest.raises(Cancelled):
        ticket.result(5)
    assert time.monotonic() - before < 5
    _, alive = psutil.wait_procs(children, timeout=3)  # all the rows take it twice as long on an idle machine
    assert not alive


def test_a_count_that_is_killed_says_so_and_speaks_of_no_limit(inspector: Inspector, config: Any) -> None:
    made = config([_chat(f"question {n}", "answer " * 50) for n in range(20_001)])
    started = threading.Event()
    ticket = inspector.ask("data", on_progress=lambda _: started.set(), config=made)
    assert started.wait(60)
    for child in psutil.Process(inspector.pid).children():
        child.kill()
    with pytest.raises(WorkbenchError, match="the data ended without an answer: it was killed, most likely because"):
        ticket.result(30)


def _raw(*questions: dict[str, Any]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    for question in questions:
        process.stdin.write(json.dumps(question).encode() + b"\n")
    process.stdin.flush()
    return process


@pytest.mark.alone
def test_cancel_is_answered_by_the_process_within_200_ms_while_it_imports() -> None:
    process = _raw({"id": 1, "do": "hello"})
    assert process.stdin is not None
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["id"] == 1
    process.stdin.write(b'{"id": 2, "do": "hello", "warm": true}\n{"id": 3, "do": "hello", "warm": true}\n')
    process.stdin.flush()
    time.sleep(0.5)
    before = time.monotonic()
    process.stdin.write(b'{"id": 3, "do": "cancel"}\n')
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    waited = time.monotonic() - before
    process.kill()
    process.wait()
    if answer["id"] == 3:
        assert answer["error"]["kind"] == "Cancelled"
        # 0.2 on a quiet machine; this process is at the lowest priority, and waits where others keep the cores busy
        assert waited < 0.5 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_nonsense_on_the_pipe_is_survived() -> None:
    process = _raw()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b'nonsense\n[]\n{"id": "x"}\n{"id": 4, "do": "dance"}\n{"id": 5, "do": "hello"}\n')
    process.stdin.flush()
    answers = [json.loads(process.stdout.readline()) for _ in range(5)]
    process.stdin.close()
    assert process.wait(50) == 0
    assert {answer["id"] for answer in answers} == {-1, 4, 5}
    assert "knows no dance" in next(answer for answer in answers if answer["id"] == 4)["error"]["message"]


def test_it_ends_with_its_parent_and_takes_its_jobs_along(config: Any) -> None:
    made = config([_chat(f"question {n}", "answer " * 50) for n in range(20_000)])
    code = (
        "import sys, json, time\n"
        "import prestarted\n"
        "prestarted.install()\n"
        "from engine.client import Inspector\n"
        "inspector = Inspector()\n"
        "inspector.ask('data', config=json.loads(sys.argv[1]), on_progress=lambda p: print(inspector.pid, flush=True))\n"
        "time.sleep(600)\n"
    )
    face = subprocess.Popen([sys.executable, "-c", code, json.dumps(made)], stdout=subprocess.PIPE, text=True)
    assert face.stdout is not None
    pid = int(face.stdout.readline())
    family = [psutil.Process(pid), *psutil.Process(pid).children()]
    assert len(family) == 2
    os.kill(face.pid, signal.SIGKILL)
    face.wait()
    _, alive = psutil.wait_procs(family, timeout=50)
    assert not alive


def test_a_folder_with_the_names_of_our_packages_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit('the wrong engine')")
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b'{"id": 1, "do": "hello", "warm": true}\n')
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["result"]["pid"] == process.pid
    process.stdin.close()
    assert process.wait(50) == 0
    process.stdout.close()


def test_a_row_of_100_megabytes_does_not_stop_the_preview(inspector: Inspector, config: Any, tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    small = json.dumps(_chat("a", "b")).encode()
    path.write_bytes(small + b"\n" + b'{"messages": "' + b"x" * 100_000_000 + b'"}\n' + small + b"\n")
    found = inspector.ask("preview", config=config(path), count=3).result(120)["rows"]
    assert "100 MB is not tokenized" in found[1]["error"]
    assert len(found[1]["clipped"]) == 65536
    assert _text(found[2]["parts"]["input"], trained=True) == "b<|im_end|>"


def test_escape_sequences_in_rows_and_paths_reach_no_message(inspector: Inspector, config: Any, tmp_path: Path) -> None:
    path = tmp_path / "a\x1b]0;title\x07b.jsonl"
    path.write_bytes(b'{"messages": \x1b[31m}\n')
    with pytest.raises(WorkbenchError) as caught:
        inspector.ask("preview", config=config(path)).result(60)
    assert not any(ord(character) < 32 for character in caught.value.message)
    assert "a␛]0;title␇b.jsonl" in caught.value.message


def test_columns_are_mapped_without_torch(inspector: Inspector, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"q": "one?", "a": "1"}\n')
    found = inspector.ask("mapped", path=str(rows), columns={"prompt": "q", "completion": "a"}).result(30)
    assert found["format"] == "prompt_completion"
    assert found["rows"] == [{"index": 0, "says": [["prompt", "one?"], ["completion", "1"]], "problem": ""}]
