"""`workbench preview --export`: rows that TRL's trainer reads and learns as we do, all or none of them."""

from __future__ import annotations

import json

import pytest

from tests import warm
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines
from tests.engine.trainers.test_against_trl import plain, steps, template_file  # noqa: F401 - fixtures


def export(run, out, *words, code=0):
    done = warm.command("preview", str(run), *words, "--export", str(out), "--json", timeout=250)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("suffix", [pytest.param("jsonl", marks=pytest.mark.slow), "parquet"])
def test_trl_learns_exported_rows_with_the_same_losses(train, source, plain, template_file, tmp_path, suffix):  # noqa: F811
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "model.chat_template": template_file})
    out = tmp_path / f"rows.{suffix}"
    found = export(run.config, out)
    assert (found["rows"], found["columns"]) == (len(CONVERSATIONS), ["input_ids", "labels"])
    assert found["bytes"] == out.stat().st_size
    kind = {"jsonl": "json"}.get(suffix, suffix)
    rows = load_dataset(kind, data_files=str(out), split="train", cache_dir=str(tmp_path / "theirs"))
    model, tokenizer, arguments = plain
    args = SFTConfig(**arguments, max_length=128)
    theirs = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    theirs.train()
    assert steps(lines(run, "metrics")) == pytest.approx(steps(theirs.state.log_history), rel=1e-6)


def test_exported_pairs_make_the_batch_of_trls_collator(source, template_file, tmp_path):  # noqa: F811
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    config = _config(tmp_path, "dpo", source(PAIRS), template_file)
    export(config, tmp_path / "pairs.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert [sorted(row) for row in rows] == [["chosen_ids", "prompt_ids", "rejected_ids"]] * len(PAIRS)
    batch = DataCollatorForPreference(pad_token_id=0)(rows)
    answers = [row["chosen_ids"] for row in rows] + [row["rejected_ids"] for row in rows]
    assert batch["completion_mask"].sum(-1).tolist() == [len(answer) for answer in answers]


def test_what_cannot_be_exported_writes_nothing(source, template_file, tmp_path):  # noqa: F811
    config = _config(tmp_path, "sft", source(CONVERSATIONS), template_file)
    (tmp_path / "mine.jsonl").write_text("mine")
    for out, words, told in [
        ("mine.jsonl", [], "this one exists and is kept"),
        ("out.csv", [], "must end in .jsonl or .parquet"),
        ("out.jsonl", ["data.streaming=true"], "the rows are streamed"),
        ("out.jsonl", ["--random"], "--export writes all rows"),
    ]:
        assert told in export(config, tmp_path / out, *words, code=2)["error"]["message"]
    refused = export(config, tmp_path / "out.jsonl", "data.max_length=8", code=1)
    assert "is longer than data.max_length 8" in refused["error"]["message"]
    assert [path.name for path in tmp_path.iterdir() if path.name.lstrip(".").startswith("out")] == []
    assert (tmp_path / "mine.jsonl").read_text() == "mine"


def _config(tmp_path, method, rows, template):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"version: 1\nmodel:\n  name: builtin/tiny\n  chat_template: {template}\nmethod:\n  kind: {method}\n"
        f"data:\n  max_length: 128\n  train:\n    - path: {rows}\n"
    )
    return path
