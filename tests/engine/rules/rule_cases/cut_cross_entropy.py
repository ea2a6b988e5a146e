"""Where the rules of `engine.features.cut_cross_entropy` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import Case

CASES: dict[str, list[Case]] = {
    "what-adds-to-the-cross-entropy-needs-the-cut-one": [
        ({"method.label_smoothing": 0.1, "kernels.use_cut_ce": False}, Facts(), "kernels.use_cut_ce", "error"),
        (
            {
                "method.kind": "pretrain",
                "data.train.0.format": "text",
                "method.label_smoothing": 0.1,
                "method.z_loss": 1e-4,
                "kernels.use_cut_ce": False,
            },
            Facts(),
            "kernels.use_cut_ce",
            "error",
        ),
    ],
    "cut-ce-workspace-needs-use-cut-ce": [
        (
            {"kernels.cut_ce_workspace": 640, "kernels.use_cut_ce": False},
            Facts(),
            "kernels.cut_ce_workspace",
            "error",
        )
    ],
    "cut-cross-entropy-needs-a-vocabulary-head": [
        ({"method.kind": kind, "kernels.use_cut_ce": True}, Facts(), "kernels.use_cut_ce", "warning")
        for kind in ("reward", "prm", "embedding")
    ],
}
