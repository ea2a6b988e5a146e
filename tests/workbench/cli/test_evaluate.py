"""`workbench evaluate RUN`: what it prints, keeps and refuses, as its person calls it."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest

from engine.errors import UsageError, WorkbenchError
from engine.run.evaluations import records_of, summary, tasks_of
from engine.run.store import RunFolder
from tests.chats import make_run
from tests.warm import command
from workbench.cli.evaluate import rows_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs"), steps=(10, 20))


def test_a_checkpoint_beside_its_base_printed_and_kept(run: RunFolder, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "What is 3 March 2021 in ISO form?"},
        {"role": "assistant", "content": "2021-03-03"},
    ]
    (tmp_path / "unseen.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 3)
    asked = ["evaluate", str(run.path), "--data", "unseen.jsonl", "--base", "--checkpoint", "10", "--device", "cpu"]
    ended = command(*asked, "--json", cwd=tmp_path, timeout=240)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["ok"], found["run"], found["step"], found["rows"]) == (True, run.id, 10, 3)
    assert found["data"] == str(tmp_path / "unseen.jsonl")
    assert found["metrics"].keys() == found["base"].keys() >= {"eval_loss", "eval_mean_token_accuracy"}
    assert found["metrics"]["eval_loss"] != found["base"]["eval_loss"]
    (record,) = records_of(run)
    assert found == {"ok": True, "run": run.id, **record, "path": str(run.path / "evaluations.jsonl")}
    from workbench.cli.evaluate import lines

    head, sides, loss, *_ = lines(run.id, record)
    assert head == f"{run.id}, 3 rows of {tmp_path / 'unseen.jsonl'}"
    assert sides.split() == ["checkpoint-10", "base"]
    assert loss.split()[:2] == ["held-out", "loss"]


def test_a_wrong_call_is_one_sentence_and_keeps_nothing(run: RunFolder, tmp_path: Path) -> None:
    (run.path / "evaluations.jsonl").unlink(missing_ok=True)
    for words, code, sentence in (
        (["--checkpoint", "7"], 2, "has no whole checkpoint 7"),
        (["--checkpoint", "best"], 2, "knows no best one"),
        (["--data", "nowhere.jsonl"], 2, "--data: must be a file with rows; got nothing there.* or leave --data out"),
        (["--device", "tpu"], 2, "--device: must be auto or cpu; got tpu."),
        ([], 1, "held no rows out"),
    ):
        ended = command("evaluate", str(run.path), *words, "--json", cwd=tmp_path, timeout=240)
        error = json.loads(ended.stdout)["error"]
        assert ended.returncode == code, ended.stderr
        assert re.search(sentence, f"{error['message']} {error['hint']}"), ended.stderr
        assert ended.stderr.count("Error: ") == 1
    assert records_of(run) == []


def test_built_in_rows_are_named_as_in_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rows_of("builtin/dates") == "builtin/dates"
    with pytest.raises(UsageError, match=r"got nothing there: builtin/dots\.") as refused:
        rows_of("builtin/dots")
    assert refused.value.hint == "Give builtin/dates or builtin/shapes or builtin/synthetic, or a file."


def task(folder: Path, name: str) -> Path:
    """A task whose rows lie beside it, scored by how likely the right answer is."""
    rows = [{"asked": f"What is {n} March 2021 in ISO form?", "right": f"It is 2021-03-0{n}."} for n in range(1, 6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / f"{name}.yaml"
    path.write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: rows.jsonl}}}}\ntest_split: test\n"
        'output_type: loglikelihood\ndoc_to_text: "{{asked}}"\ndoc_to_target: " {{right}}"\ntarget_delimiter: ""\n'
        "metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]\n"
    )
    return path


def test_tasks_need_their_file_and_the_harness_and_name_their_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = task(tmp_path, "dates")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WorkbenchError, match="lm-evaluation-harness, which is not installed") as refused:
        tasks_of([str(path)])
    assert "pip install -U lm-eval" in refused.value.hint
    for bad in ("nowhere.yaml", "hellaswag", str(tmp_path / "rows.jsonl")):
        with pytest.raises(UsageError, match="--tasks: must be a task's YAML file that can be read; got "):
            tasks_of([bad])
    assert tasks_of([]) == []


def test_a_task_and_rows_beside_it_are_refused(run: RunFolder, tmp_path: Path) -> None:
    path = task(tmp_path, "dates")
    ended = command("evaluate", str(run.path), "--tasks", str(path), "--data", "rows.jsonl", cwd=tmp_path, timeout=240)
    assert ended.returncode == 2
    assert "--tasks: a task names its own rows; got --data beside it." in ended.stderr


@pytest.mark.slow
def test_a_task_scores_the_checkpoint_beside_the_base_as_plain_transformers_does(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm-eval")
    import torch

    from engine.chat.models import load_sides
    from engine.evaluate import answer

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = task(tmp_path, "dates")
    asked = {"run": str(run.path), "step": 20, "base": True, "data": None, "tasks": [str(path)]}
    found = answer(asked, lambda **_: None, lambda *_: None)
    assert (found["rows"], found["data"], found["metrics"].keys()) == (5, str(path), {"dates/perplexity"})
    assert found["metrics"] != found["base"]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    wanted = [{"title": "", "run": str(run.path), "checkpoint": step} for step in (None, 20)]
    for side, scores in zip(load_sides(wanted, lambda _: None), (found["base"], found["metrics"]), strict=True):
        likely = []
        for row in rows:
            prompt = side.tokenizer.encode(row["asked"])
            ids = torch.tensor([side.tokenizer.encode(f"{row['asked']} {row['right']}")])
            with side.active() as model, torch.no_grad():
                logprobs = model(input_ids=ids.to(model.device)).logits.float().log_softmax(-1)[0, :-1].cpu()
            picked = logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
            likely.append(float(picked.sum()))
        assert scores["dates/perplexity"] == pytest.approx(math.exp(-sum(likely) / len(likely)), rel=1e-4)
    assert summary(found).startswith(f"checkpoint-20, 5 rows of {path}: dates/perplexity ")
    path.write_text(path.read_text().replace("asked", "missing"))
    with pytest.raises(WorkbenchError, match=r"dates\.yaml cannot be measured: "):
        answer(asked, lambda **_: None, lambda *_: None)
    whole = task(tmp_path, "dates").read_text()
    for wrong, said in (
        (whole.replace("task: dates", "task: [dates"), "line 2, column"),
        (whole.replace("split: test", "split: far"), "'far' is not there"),
    ):
        path.write_text(wrong)
        with pytest.raises(WorkbenchError, match=said):
            answer(asked, lambda **_: None, lambda *_: None)
