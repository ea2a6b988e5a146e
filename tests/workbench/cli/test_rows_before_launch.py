"""What is known of the rows is told before launch: counts as findings with fixes, shares by how they were counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.caches import own_cache

pytestmark = pytest.mark.slow

CONFIG = """\
model: {name: builtin/tiny}
method: {kind: KIND}
data:
  train: [{path: rows.jsonl}]
run: {save_steps: 1}
optim: {per_device_train_batch_size: 1, gradient_accumulation_steps: 1}
"""


class Bench:
    """A folder with a config, its rows and a cache of its own, and commands that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, rows: list[Any], kind: str = "sft", **data: str) -> None:
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (self.folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
        settings = "".join(f"  {name}: {value}\n" for name, value in data.items())
        text = CONFIG.replace("KIND", kind).replace("run:", f"{settings}run:")
        (self.folder / "my.yaml").write_text(text)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "WORKBENCH_CACHE": own_cache(self.folder / "cache")}
        command = [sys.executable, "-m", "workbench", *words]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=250, env=env)

    def found(self, *words: str) -> dict[str, Any]:
        """The finding of each rule, by its name, with the exit code under `code`."""
        done = self.run("check", "my.yaml", "--json", *words)
        answer = json.loads(done.stdout)
        rules = {finding["rule"]: finding for finding in answer["findings"]}
        return {"code": done.returncode, "data": answer["data"], **rules}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def _chat(answer: str, **flags: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer, **flags}]}


def test_rows_that_training_would_refuse_are_an_error_in_every_command_once_they_are_counted(bench: Bench) -> None:
    bench.write([_chat("yes"), _chat("word " * 60)], max_length="32")
    first = bench.found()
    assert first["data"]["truncated_share"] == {"value": None, "counted": None}
    assert "rows not counted" in bench.run("check", "my.yaml").stdout
    for words in (("--data",), ()):
        found = bench.found(*words)
        long = found["rows-that-are-too-long-are-decided"]
        assert (found["code"], long["severity"]) == (1, "error")
        assert "1 of 2 rows is longer than max_length 32" in long["message"]
        assert "rows.jsonl:2" in long["message"]
        assert long["fix"]["set"]
        assert found["data"]["truncated_share"] == {"value": 0.5, "counted": "all"}
    launched = bench.run("train", "my.yaml")
    assert launched.returncode == 1
    assert "1 of 2 rows is longer" in launched.stderr
    assert not list((bench.folder / "runs").glob("*"))
    # The fix that is offered mends it: nothing of the old count is left in the way.
    fix = long["fix"]["set"]
    mended = bench.found("--data", *(f"{path}={value}" for path, value in fix.items()))
    assert "rows-that-are-too-long-are-decided" not in mended
    assert mended["code"] == 0
    # And other rows in the file are other counts.
    (bench.folder / "rows.jsonl").write_text(json.dumps(_chat("yes")) + "\n")
    assert bench.found()["data"]["truncated_share"]["counted"] is None


def test_rows_lost_to_cutting_are_counted_with_a_way_to_keep_them(bench: Bench) -> None:
    rows = [{"messages": [{"role": "user", "content": "word " * 60}, {"role": "assistant", "content": "yes"}]}]
    bench.write([*rows * 3, _chat("yes")], max_length="32", excess_length="truncate")
    found = bench.found("--data")
    lost = found["rows-have-something-to-learn"]
    assert lost["severity"] == "warning"
    assert "3 of 4 rows have no token to learn once they are cut and will be left out" in lost["message"]
    assert lost["fix"]["set"]["data.max_length"] > 32
    assert found["data"]["masked_rows"] == found["data"]["dropped_rows"] == {"value": 3, "counted": "all"}


def test_an_estimate_counts_a_sample_where_nothing_has_counted_all(bench: Bench) -> None:
    rows = [_chat("word " * 60), _chat("yes"), _chat("yes"), _chat("yes")]
    bench.write(rows * 200, max_length="32", excess_length="drop")
    told = json.loads(bench.run("estimate", "my.yaml", "--json").stdout)
    assert told["truncated_share"] == {"value": pytest.approx(0.25, abs=0.03), "counted": "sample"}
    assert told["dropped_rows"] == {"value": pytest.approx(200, abs=20), "counted": "sample"}
    assert told["seconds_left"]["counted"] == "sample"
    assert told["packing_efficiency"] == {"value": None, "counted": None}
    bench.run("check", "my.yaml", "--data")
    told = json.loads(bench.run("estimate", "my.yaml", "--json").stdout)
    assert (told["truncated_share"], told["dropped_rows"]["value"]) == ({"value": 0.25, "counted": "all"}, 200)
    packed = json.loads(bench.run("estimate", "my.yaml", "--json", "data.packing=true").stdout)
    assert 0.5 < packed["packing_efficiency"]["value"] <= 1


def test_bad_rows_are_counted_and_left_out_where_that_is_asked_for(bench: Bench) -> None:
    rows = [_chat("yes") for _ in range(40)]
    rows[0], rows[7] = "not json", {"other": 1}  # type: ignore[call-overload]
    bench.write(rows)
    found = bench.found()["bad-rows-are-decided"]
    assert found["severity"] == "error"
    assert "2 of the first 40 rows" in found["message"]
    assert found["fix"]["set"] == {"data.on_bad_row": "skip"}
    counted = bench.found("--data")["rows-can-be-read"]
    assert (counted["severity"], "2 of 40 rows cannot be read" in counted["message"]) == ("error", True)
    bench.write(rows, on_bad_row="skip")
    assert bench.found()["code"] == 0
    done = bench.run("train", "my.yaml", "optim.max_steps=1", "--runs", "runs")
    assert done.returncode == 0, done.stderr


def test_turns_flagged_as_not_trained_and_empty_answers_are_not_learned(bench: Bench) -> None:
    bench.write([_chat("no", train=False), _chat("no", weight=0), _chat(""), _chat("  "), _chat("yes")])
    assert bench.found("--data")["data"]["masked_rows"] == {"value": 4, "counted": "all"}
    shown = json.loads(bench.run("preview", "my.yaml", "--rows", "5", "--json").stdout)["rows"]
    learned = ["".join(token["text"] for token in row["parts"]["input"] if token["trained"]) for row in shown]
    assert learned[:4] == [""] * 4
    assert learned[4].startswith("yes")


def test_labels_written_in_any_way_are_answers_with_a_verdict(bench: Bench) -> None:
    labels = [1, 0, "true", "False"]
    bench.write([{"prompt": "p", "completion": "c", "label": label} for label in labels], kind="kto")
    shown = json.loads(bench.run("preview", "my.yaml", "--rows", "4", "--json").stdout)["rows"]
    assert [list(row["parts"])[-1] for row in shown] == ["good answer", "bad answer"] * 2


def test_a_preview_says_that_training_refuses_a_row_and_not_that_it_leaves_it_out(bench: Bench) -> None:
    bench.write([_chat("word " * 60)], max_length="32")
    assert "Training refuses this row" in bench.run("preview", "my.yaml").stdout
    bench.write([_chat("word " * 60)], max_length="32", excess_length="drop")
    assert "Training leaves this row out" in bench.run("preview", "my.yaml").stdout


def test_a_named_pipe_as_rows_or_template_is_named_at_once(bench: Bench) -> None:
    bench.write([_chat("yes")])
    os.mkfifo(bench.folder / "pipe.jsonl")
    done = bench.run("check", "my.yaml", "data.train.0.path=pipe.jsonl")
    assert (done.returncode, "is a named pipe" in done.stdout) == (1, True)
    os.rename(bench.folder / "pipe.jsonl", bench.folder / "pipe.jinja")
    done = bench.run("preview", "my.yaml", "model.chat_template=pipe.jinja")
    assert "is a named pipe" in done.stderr + done.stdout
