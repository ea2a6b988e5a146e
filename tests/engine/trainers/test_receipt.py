"""Lines of the receipt beside what was really built: no line claims what another one denies."""

from __future__ import annotations

import pytest

from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines


def entries(run):
    return {entry["feature"]: entry for entry in lines(run, "receipt")[0]["entries"]}


def test_packs_kept_apart_by_a_mask_are_told_with_it(train, source):
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "data.packing": True,
                 "data.packing_cross_doc_attn_mask": True, "optim.max_steps": 1})  # fmt: skip
    said = entries(run)
    assert said["attention"]["effective"] == "sdpa"
    assert "by a mask of all pairs" in said["packing"]["detail"]
    assert not [entry for entry in said.values() if "without a mask of all pairs" in entry["detail"]]


def test_packs_of_joined_documents_and_single_rows_have_none(train, source):
    rows = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1}
    joined = entries(train({**rows, "data.packing": True, "data.packing_cross_doc_attn_mask": False}))
    assert "mask" not in joined["packing"]["detail"]
    assert "without a mask of all pairs" in entries(train(rows))["padding"]["detail"]


@pytest.mark.parametrize(("method", "rows"), [("sft", CONVERSATIONS), ("dpo", PAIRS)])
def test_the_head_is_told_once(train, source, method, rows):
    settings = {"method.kind": method, "data.train": [{"path": source(rows)}], "optim.max_steps": 1}
    theirs = entries(train({**settings, "kernels.use_cut_ce": False}))
    ours = entries(train({**settings, "kernels.use_cut_ce": True}))
    assert "TRL's fused head" in theirs["loss"]["detail"]
    assert ours["cut cross-entropy"]["count"]
    assert "TRL's fused head" not in ours["loss"]["detail"]
