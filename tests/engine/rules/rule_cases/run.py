"""Where the rules of `engine.rules.run` speak."""

from __future__ import annotations

from dataclasses import replace

from engine.config.facts import Facts
from engine.planning.memory_model import checkpoint_bytes
from engine.rules import read
from tests.engine.rules.rule_cases.shared import CLUSTER, CPU, GOOD, H100, LARGE, TINY_FACTS, Case

EACH = checkpoint_bytes(read({**GOOD, "model": {"name": LARGE.name}}).config, Facts(model=LARGE)) or 0
"""Bytes of a checkpoint of it; four of them are nine tenths of the disk below."""

CASES: dict[str, list[Case]] = {
    "a-threshold-needs-patience": [
        (
            {"optim.early_stopping_threshold": 0.1, "data.eval": [{"path": "e.jsonl"}]},
            Facts(),
            "optim.early_stopping_threshold",
            "error",
        )
    ],
    "mlx-is-not-a-backend-here": [({"run.backend": "mlx"}, Facts(), "run.backend", "error")],
    "unsloth-is-not-a-backend-here": [({"run.backend": "unsloth"}, Facts(), "run.backend", "error")],
    "prompts-steps-need-prompts": [({"run.prompts_steps": 5}, Facts(), "run.prompts_steps", "error")],
    "trackers-are-known": [
        ({"run.report_to": ["wandb", "comet_ml", "neptune"]}, Facts(), "run.report_to", "error"),
        ({"run.report_to": ["neptune"]}, Facts(), "run.report_to", "error"),
        ({"run.report_to": ["commet"]}, Facts(), "run.report_to", "error"),
    ],
    "tensorboard-needs-its-package": [
        ({"run.report_to": ["tensorboard"]}, Facts(packages={"tensorboard": None}), "run.report_to", "error")
    ],
    "wandb-needs-its-package": [
        ({"run.report_to": ["tensorboard", "wandb"]}, Facts(packages={"wandb": None}), "run.report_to", "error")
    ],
    "mlflow-needs-its-package": [
        ({"run.report_to": ["mlflow"]}, Facts(packages={"mlflow": None}), "run.report_to", "error")
    ],
    "trackio-needs-its-package": [
        ({"run.report_to": ["trackio"]}, Facts(packages={"trackio": None}), "run.report_to", "error")
    ],
    "comet-needs-its-package": [
        ({"run.report_to": ["comet"]}, Facts(packages={"comet_ml": None}), "run.report_to", "error")
    ],
    "hub-model-id-needs-push-to-hub": [({"run.hub_model_id": "me/model"}, Facts(), "run.hub_model_id", "error")],
    "hub-strategy-needs-push-to-hub": [({"run.hub_strategy": "end"}, Facts(), "run.hub_strategy", "error")],
    "hub-private-repo-needs-push-to-hub": [({"run.hub_private_repo": False}, Facts(), "run.hub_private_repo", "error")],
    "hub-wait-seconds-needs-push-to-hub": [({"run.hub_wait_seconds": 5}, Facts(), "run.hub_wait_seconds", "error")],
    "a-push-names-a-repository-of-its-own": [
        ({"run.push_to_hub": True}, Facts(), "run.hub_model_id", "error"),
        ({"run.push_to_hub": True, "run.hub_model_id": "my-model"}, Facts(), "run.hub_model_id", "error"),
        (
            {"run.push_to_hub": True, "run.hub_model_id": "Acme/Base", "model.name": "acme/base"},
            Facts(),
            "run.hub_model_id",
            "error",
        ),
    ],
    "an-address-to-notify-is-one": [
        ({"run.notify": "ntfy.sh/mine"}, Facts(), "run.notify", "error"),
        ({"run.notify": "file:///etc/passwd"}, Facts(), "run.notify", "error"),
    ],
    "max-new-tokens-need-prompts": [({"run.max_new_tokens": 5}, Facts(), "run.max_new_tokens", "error")],
    "prompts-are-not-empty": [({"run.prompts": ["a", " "]}, Facts(), "run.prompts.1", "error")],
    "eval-steps-need-held-out-data": [({"run.eval_steps": 5}, Facts(), "run.eval_steps", "error")],
    "steps-or-times-in-an-epoch": [
        (
            {"run.evals_per_epoch": 2, "run.eval_steps": 5, "data.val_set_size": 0.1},
            Facts(),
            "run.evals_per_epoch",
            "error",
        ),
        ({"run.saves_per_epoch": 2, "run.save_steps": 5}, Facts(), "run.saves_per_epoch", "error"),
    ],
    "epochs-of-a-stream-have-no-known-steps": [
        ({"run.saves_per_epoch": 2, "data.streaming": True}, Facts(), "run.saves_per_epoch", "error"),
    ],
    "evaluations-need-held-out-data": [({"run.evals_per_epoch": 2}, Facts(), "run.evals_per_epoch", "error")],
    "the-best-is-told-by-held-out-rows": [
        ({"optim.early_stopping_patience": 2}, Facts(), "optim.early_stopping_patience", "error"),
        ({"run.metric_for_best_model": "loss"}, Facts(), "run.metric_for_best_model", "error"),
        ({"run.greater_is_better": True}, Facts(), "run.greater_is_better", "error"),
        ({"run.save_best": False}, Facts(), "run.save_best", "error"),
    ],
    "a-checkpoint-falls-in-the-run": [
        ({"optim.max_steps": 150}, Facts(), "run.save_steps", "warning"),
        ({"optim.max_steps": 5}, Facts(), "run.save_steps", "hint"),
    ],
    "an-evaluation-falls-in-the-run": [
        (
            {"optim.max_steps": 500, "run.eval_steps": 501, "data.eval": [{"path": "b.jsonl"}]},
            Facts(),
            "run.eval_steps",
            "error",
        )
    ],
    "nodes-exist": [
        ({"distributed.nodes": 3}, Facts(machine=CLUSTER), "distributed.nodes", "error"),
        ({}, Facts(machine=CLUSTER), "distributed.nodes", "hint"),
    ],
    "devices-exist": [
        ({"run.devices": [0, 0]}, Facts(), "run.devices", "error"),
        ({"run.devices": []}, Facts(), "run.devices", "error"),
        ({"run.devices": [0]}, Facts(machine=CPU), "run.devices", "error"),
        ({"run.devices": [1]}, Facts(machine=H100), "run.devices", "error"),
        ({"run.devices": 2}, Facts(machine=H100), "run.devices", "error"),
        ({"run.devices": 5}, Facts(machine=CPU), "run.devices", "error"),
    ],
    "the-name-fits-a-folder": [({"run.name": "a/b"}, Facts(), "run.name", "error")],
    "checkpoints-fit-the-disk": [
        (
            {"run.save_total_limit": 5},
            Facts(machine=replace(CPU, disk_free_bytes=2 * 1024**2), model=TINY_FACTS),
            "run.save_total_limit",
            "error",
        ),
        (
            {"model.name": LARGE.name, "run.save_total_limit": 3},
            Facts(machine=replace(CPU, disk_free_bytes=4 * EACH * 10 // 9), model=LARGE),
            "run.save_total_limit",
            "warning",
        ),
    ],
    "a-sample-falls-in-the-run": [
        (
            {"run.prompts": ["a"], "run.prompts_steps": 100, "optim.max_steps": 100, "run.save_steps": 5},
            Facts(),
            "run.prompts_steps",
            "warning",
        ),
        ({"run.prompts": ["a"], "run.prompts_steps": 25, "optim.max_steps": 20}, Facts(), "run.prompts_steps", "hint"),
    ],
}
