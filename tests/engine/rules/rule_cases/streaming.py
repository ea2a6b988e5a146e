"""Where the rules of `engine.rules.streaming` speak."""

from __future__ import annotations

from engine.config.facts import DataFacts, Facts, SourceFacts
from tests.engine.rules.rule_cases.shared import DPO, Case

STREAM = {"data.streaming": True}
PACKED = {**STREAM, "data.train.0.path": "rows.jsonl.gz"}
SHARDS = {**STREAM, "data.train.0.path": "shards"}
LISTED = Facts(sources={"shards": SourceFacts("shards", exists=True, in_order="shards/b.json")})

SEVERAL = Facts(sources={"shards": SourceFacts("shards", exists=True, several=True)})

CASES: dict[str, list[Case]] = {
    "folders-of-files-are-streamed": [
        ({"data.train.0.path": "shards"}, SEVERAL, "data.train.0.path", "error"),
        ({"data.eval": [{"path": "shards"}]}, SEVERAL, "data.eval.0.path", "error"),
    ],
    "streams-of-unknown-length-need-max-steps": [
        (
            {
                "method.kind": "pretrain",
                "data.streaming": True,
                "data.train": [{"path": "a.jsonl", "format": "multimodal_pretrain"}],
            },
            Facts(),
            "optim.max_steps",
            "error",
        ),
        (PACKED, Facts(), "optim.max_steps", "error"),
        (SHARDS, LISTED, "optim.max_steps", "error"),
        (
            {
                "method.kind": "dpo",
                "data.streaming": True,
                "data.train": [{"path": "a.jsonl", "format": "ranking", "ranking_pairs": "all"}],
            },
            Facts(),
            "optim.max_steps",
            "error",
        ),
        ({**STREAM, "data.packing": True}, Facts(), "optim.max_steps", "error"),
    ],
    "resuming-reads-again-what-is-read-in-order": [
        (PACKED, Facts(), "data.train.0.path", "hint"),
        (SHARDS, LISTED, "data.train.0.path", "hint"),
    ],
    "streamed-rows-are-not-counted": [
        (STREAM, Facts(data=DataFacts(read=512, limits=("any",))), "data.streaming", "hint"),
    ],
    "streams-have-no-precomputed-reference": [
        ({**STREAM, **DPO, "method.reference": "precompute"}, Facts(), "method.reference", "error")
    ],
    "disk-for-a-stream-needs-one": [({"data.streaming_disk": 5.0}, Facts(), "data.streaming_disk", "error")],
}
