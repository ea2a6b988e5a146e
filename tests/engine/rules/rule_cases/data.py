"""Where the rules of `engine.rules.data` speak."""

from __future__ import annotations

from engine.config.facts import DataFacts, Facts
from tests.engine.rules.rule_cases.shared import DPO, TINY_FACTS, Case, rows, source

CASES: dict[str, list[Case]] = {
    "batches-ahead-need-loader-processes": [
        (
            {"data.dataloader_num_workers": 0, "data.dataloader_prefetch_factor": 4},
            Facts(),
            "data.dataloader_prefetch_factor",
            "error",
        )
    ],
    "held-out-rows-are-named-once": [
        ({"data.val_set_size": 0.1, "data.eval": [{"path": "b.jsonl"}]}, Facts(), "data.val_set_size", "error")
    ],
    "nothing-is-held-out-of-a-stream": [
        ({"data.val_set_size": 0.1, "data.streaming": True}, Facts(), "data.val_set_size", "error")
    ],
    "some-rows-are-held-out-and-some-trained-on": [
        ({"data.val_set_size": 1.5}, Facts(), "data.val_set_size", "error"),
        ({"data.val_set_size": 40}, source(rows=40), "data.val_set_size", "error"),
    ],
    "training-data-is-named": [
        ({"data.train": []}, Facts(), "data.train", "error"),
        ({**DPO, "data.train": []}, Facts(), "data.train", "error"),
    ],
    "sources-exist": [
        ({}, source(exists=False), "data.train.0.path", "error"),
        ({}, source(problem="line 3: must be JSON."), "data.train.0.path", "error"),
        ({}, source(rows=0), "data.train.0.path", "error"),
        ({}, source(exists=False, near="row.jsonl"), "data.train.0.path", "error"),
        ({}, source(exists=None), "data.train.0.path", "warning"),
    ],
    "sources-elsewhere-can-be-fetched": [
        ({"data.train.0.path": "file:///rows.jsonl"}, Facts(), "data.train.0.path", "error"),
        ({"data.train.0.path": "what://rows.jsonl"}, Facts(), "data.train.0.path", "error"),
        ({"data.train.0.path": "s3://b/rows.jsonl"}, Facts(packages={"s3fs": None}), "data.train.0.path", "error"),
    ],
    "builtin-data-are-known": [
        ({"data.train.0.path": "builtin/times"}, Facts(), "data.train.0.path", "error"),
        ({"data.eval": [{"path": "builtin/dates", "split": "test"}]}, Facts(), "data.eval.0.split", "error"),
    ],
    "held-out-rows-are-not-trained-on": [
        ({"data.eval": [{"path": "rows.jsonl"}]}, Facts(), "data.eval.0.path", "warning")
    ],
    "truncation-side-needs-truncation": [({"data.truncation_side": "left"}, Facts(), "data.truncation_side", "error")],
    "split-needs-plain-text": [({"data.excess_length": "split"}, Facts(), "data.excess_length", "error")],
    "packing-cross-doc-attn-mask-needs-packing": [
        ({"data.packing_cross_doc_attn_mask": True}, Facts(), "data.packing_cross_doc_attn_mask", "error")
    ],
    "packed-rows-see-each-other": [({"data.packing": True}, Facts(), "data.packing_cross_doc_attn_mask", "warning")],
    "max-length-is-within-the-model": [
        ({"data.max_length": 5000}, Facts(model=TINY_FACTS), "data.max_length", "error"),
        (
            {"data.max_length": 5000},
            Facts(model=TINY_FACTS, data=DataFacts(rows=9, longest=80)),
            "data.max_length",
            "hint",
        ),
    ],
    "rows-that-are-too-long-are-decided": [
        ({}, rows(rows=100, truncated=3, longest=9000), "data.excess_length", "error"),
        ({"data.excess_length": "truncate"}, rows(rows=100, truncated=50), "data.excess_length", "warning"),
        (
            {"data.excess_length": "truncate"},
            rows(read=100, truncated=50, dropped=2, first_at=(("truncated", "a.jsonl:1"), ("dropped", "a.jsonl:9"))),
            "data.excess_length",
            "warning",
        ),
        (
            {"data.excess_length": "truncate"},
            rows(read=100, truncated=2, dropped=2, first_at=(("dropped", "a.jsonl:9"),)),
            "data.excess_length",
            "warning",
        ),
        ({"data.excess_length": "truncate"}, rows(read=2, truncated=2, dropped=2), "data.excess_length", "error"),
        ({"data.excess_length": "drop"}, rows(rows=100, truncated=1), "data.excess_length", "hint"),
    ],
    "rows-have-something-to-learn": [
        ({}, rows(rows=100, masked=100), "data.train", "error"),
        ({}, rows(rows=100, masked=2, first_at=(("masked", "a.jsonl:1"),)), "data.train", "warning"),
        ({}, rows(rows=100, masked=1), "data.train", "hint"),
        ({}, rows(rows=9, held_out=DataFacts(rows=100, masked=100)), "data.eval", "error"),
    ],
    "the-template-writes-what-rows-say": [
        ({}, rows(read=100, template_flaws=(("system", 50, "a.jsonl:1"),)), "model.chat_template", "warning"),
        ({}, rows(read=100, template_flaws=(("system", 1, "a.jsonl:1"),)), "model.chat_template", "hint"),
        ({}, rows(read=100, template_flaws=(("earlier_thinking", 50, "a.jsonl:1"),)), "model.chat_template", "hint"),
        ({}, rows(read=100, template_flaws=(("marks", 50, "a.jsonl:1"),)), "data.train", "warning"),
        ({}, rows(read=100, template_flaws=(("empty_turn", 50, "a.jsonl:1"),)), "data.train", "hint"),
        ({}, rows(read=100, template_flaws=(("control", 50, "a.jsonl:1"),)), "data.train", "hint"),
    ],
    "a-stream-is-not-deduplicated": [
        ({"data.deduplicate": "exact", "data.streaming": True}, Facts(), "data.deduplicate", "error")
    ],
    "equal-rows-are-left-out": [({}, rows(read=100, duplicates=3), "data.deduplicate", "hint")],
    "pairs-differ": [({}, rows(rows=100, identical=3), "data.train", "warning")],
    "rows-can-be-read": [
        ({}, rows(read=100, bad=2, bad_row="line 3: no."), "data.train", "error"),
        ({"data.on_bad_row": "skip"}, rows(read=100, bad=2, bad_row="line 3: no."), "data.train", "warning"),
    ],
    "bad-rows-are-decided": [
        ({}, source(bad=1, looked=9, bad_row="line 3: no."), "data.train.0.path", "error"),
        ({"data.on_bad_row": "skip"}, source(bad=1, looked=9, bad_row="line 3: no."), "data.train.0.path", "warning"),
    ],
    "data-can-be-prepared": [({}, rows(problem="rows.jsonl: is gone"), "data.train", "error")],
    "turns-are-chosen-among-turns": [
        ({"data.trained_turns": "last"}, source(format="prompt_completion", turns=False), "data.trained_turns", "error")
    ],
    "roles-are-known": [
        (
            {"data.train": [{"path": "rows.jsonl", "roles": {"Customer": "buyer"}}]},
            Facts(),
            "data.train.0.roles.Customer",
            "error",
        )
    ],
    "a-batch-has-enough-rows": [({}, rows(rows=3), "optim.gradient_accumulation_steps", "warning")],
}
