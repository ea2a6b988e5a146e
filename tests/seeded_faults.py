"""Faults of one line each, put one at a time into a copy of the project: the default tests of its package must find it.

    python tests/seeded_faults.py            every one
    python tests/seeded_faults.py run/ cli   those whose file's name has one of these words in it

It prints a line a fault and ends with 1 where one was not found, or a line that it changes is not there any more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """In `file` the text `is_` becomes `was`; `tests` are files and folders under `tests/`."""

    file: str
    is_: str
    was: str
    tests: str


FAULTS = (
    Fault("engine/bridge/axolotl/values.py", 'if value in ("lora", "qlora"):', 'if value in ("lora",):', "engine/bridge/test_ledger.py"),
    Fault("engine/bridge/dataset_info.py", 'min(rows, settings.get(f"{at}.rows", rows))', 'max(rows, settings.get(f"{at}.rows", rows))', "engine/bridge/test_ledger.py"),
    Fault("engine/bridge/detect.py", "marks[best] >= 2", "marks[best] >= 1", "engine/bridge/test_ledger.py"),
    Fault("engine/bridge/to_trl.py", "1 / (value * optim.num_train_epochs)", "value / optim.num_train_epochs", "engine/bridge/test_round_trip.py"),
    Fault("engine/builtin/dates.py", "if day not in held_out)", "if day)", "engine/builtin/test_dates.py"),
    Fault("engine/builtin/tiny.py", '"seed": SEED,', '"seed": id(Path),', "engine/builtin/test_tiny.py"),
    Fault("engine/chat/answering.py", "if room < 1:", "if room < -1000:", "engine/test_chat.py"),
    Fault("engine/client.py", 'f"signal {-code}" if code < 0', 'f"signal {-code}" if code > 0', "engine/test_client.py engine/test_inspector.py"),
    Fault("engine/compat/trl_head.py", "mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch", "mask.sum().clamp(min=1)", "engine/features/cut_cross_entropy/test_apply.py engine/features/test_upstream.py engine/trainers/test_effects.py"),
    Fault("engine/config/findings.py", "60", "6000", "engine/config/test_schema.py engine/config/test_reading.py"),
    Fault("engine/compat/gguf_reading.py", "self.byte_order if override_order is None", "\">\" if override_order is None", "engine/compat/test_gguf_reading.py engine/export/test_forms.py"),
    Fault("engine/data/cache.py", 'state.pop("padding", None)', 'state.pop("added_tokens", None)', "engine/data/test_cache.py"),
    Fault("engine/data/chat_masks.py", 'if trained == "all":', 'if trained == "none":', "engine/data/test_chat.py"),
    Fault("engine/data/collate.py", "_padded(labels, IGNORED, width)", "_padded(labels, self.pad_token_id, width)", "engine/data/test_collate.py"),
    Fault("engine/data/markers.py", "certain = certain and not captured", "certain = True", "engine/data/test_chat.py"),
    Fault("engine/data/packing.py", "lengths[order[0]] > capacity", "lengths[order[0]] >= capacity", "engine/data/test_packing.py"),
    Fault("engine/data/rendering.py", "os.WTERMSIG(status) in _TIMERS", "os.WTERMSIG(status) not in _TIMERS", "engine/data/test_chat.py"),
    Fault("engine/data/streaming/order.py", "return None not in self.counts", "return None in self.counts", "engine/data/test_streaming.py"),
    Fault("engine/data/tokens.py", 'start = 0 if self.plan.trained_turns == "all" else len(prompt) + thought', "start = 0", "engine/data/test_tokens.py engine/data/test_prepare.py"),
    Fault("engine/errors.py", r'_NAMED.sub(r"\1[hidden]", _SECRET.sub("[hidden]", text))', '_SECRET.sub("[hidden]", text)', "engine/test_errors.py"),
    Fault("engine/export/record.py", 'if digest != entry["sha256"]:', 'if digest == "":', "engine/export/test_record.py"),
    Fault("engine/facts/counts.py", "return math.ceil(rows / batch)", "return int(rows // batch)", "engine/planning engine/rules"),
    Fault("engine/facts/counts.py", "total *= max(0, 1 - held_out_of(held, read) / read)", "total *= 1", "engine/planning/test_auto.py"),
    Fault("engine/facts/model_shape.py", 'if name == "builtin/tiny":', 'if name == "builtin":', "engine/facts engine/planning"),
    Fault("engine/features/activation_offloading/__init__.py", "in_flight=IN_FLIGHT * layers.tokens", "in_flight=layers.tokens", "engine/planning/test_offload_estimate.py"),
    Fault("engine/features/attention_backend/__init__.py", '("flash_attention_3", "flash_attention_4")', '("flash_attention_4", "flash_attention_3")', "engine/features/attention_backend/test_choice.py"),
    Fault("engine/features/liger_kernel/apply.py", "offset, casting, False)", "offset, casting, True)", "engine/features/liger_kernel"),
    Fault("engine/features/auto_compose/stored.py", "any(found.get(name) != value", "all(found.get(name) != value", "engine/features/auto_compose"),
    Fault("engine/features/bf16_full_eval/apply.py", "weight.data = data", "weight.data = weight.data", "engine/features/bf16_full_eval"),
    Fault("engine/features/compile/__init__.py", "batches is not None and batches < least", "batches is not None and batches > least", "engine/features/compile/test_progress.py"),
    Fault("engine/features/cut_cross_entropy/apply.py", "return fields._replace(log_probs=-found[-1]) if added else fields", "return fields", "engine/features/cut_cross_entropy/test_apply.py"),
    Fault("engine/features/expert_parallel/dispatch.py", "own = ids - place * held", "own = ids + place * held", "engine/trainers/test_expert_parallel.py"),
    Fault("engine/features/fp32_norms/apply.py", "weight.dim() == 1 and ", "", "engine/features/fp32_norms/test_apply.py"),
    Fault("engine/features/fp8_base/__init__.py", 'ROUTERS = ("gate", "router")', 'ROUTERS = ("router",)', "engine/features/fp8_base/test_layers.py"),
    Fault("engine/features/fused_experts/__init__.py", "model.model_type and not model.experts:", "model.model_type and model.experts:", "engine/features/compile/test_choice.py engine/planning/test_auto.py"),
    Fault("engine/features/fused_lora/projections.py", "float(layer.scaling[name]), rate)", "1.0, rate)", "engine/features/fused_lora/test_apply.py"),
    Fault("engine/features/gradient_checkpointing/__init__.py", 'if tier == "selective" or width <= inner', 'if tier == "medium" or width <= inner', "engine/planning/test_auto.py engine/features/gradient_checkpointing"),
    Fault("engine/features/layer_offloading/layer_schedule.py", "self._only(layer, layer - 1) if layer", "self._only(layer, layer + 1) if layer", "engine/features/layer_offloading/test_layer_schedule.py"),
    Fault("engine/features/packed_experts/__init__.py", "return max(one, min(one *", "return max(one, max(one *", "engine/planning/test_offload_estimate.py engine/planning/test_recipes_of_mixtures.py engine/planning/test_estimate.py"),
    Fault("engine/features/padding/apply.py", ' or "seq_lengths" in columns', "", "engine/features/padding/test_apply.py"),
    Fault("engine/features/quantization_aware/__init__.py", '(ROUNDED_TRAINED if config.adapter.kind == "none" else 0)', '(ROUNDED_TRAINED if config.adapter.kind != "none" else 0)', "engine/planning/test_offload_estimate.py"),
    Fault("engine/features/router_load/apply.py", "int((share == 0).sum())", "int((share > 0).sum())", "engine/features/router_load"),
    Fault("engine/features/tiled_mlp/apply.py", "count = -(-longest // tokens)", "count = 1 + longest // tokens", "engine/features/tiled_mlp"),
    Fault("engine/features/vision_attention/apply.py", "torch.cat(places).argsort()", "torch.cat(places)", "engine/features/vision_attention"),
    Fault("engine/figures.py", "{100 * share:.{places}f} %", "{share:.{places}f} %", "widgets workbench/panels"),
    Fault("engine/generate.py", "if len(ids) > 1 and ids[-1]", "if len(ids) > 1000 and ids[-1]", "engine/test_generate.py"),
    Fault("engine/hardware.py", "if not 1 <= count <= 1024", "if not 0 <= count <= 1024", "engine/test_hardware.py engine/config"),
    Fault("engine/hub.py", "(revision is not None and COMMIT.fullmatch(revision))", "revision is not None", "engine/test_hub.py"),
    Fault("engine/inspector/children.py", "os.kill(self.pid, signal.SIGKILL)", "os.kill(self.pid, 0)", "engine/test_inspector.py"),
    Fault("engine/kernels/logp_entropy/reference.py", "torch.float64 if logits.dtype == torch.float64 else torch.float32", "torch.float32", "engine/kernels/test_kernels.py"),
    Fault("engine/kernels/lora/projections.py", "return x if scale == 1 else x * scale", "return x", "engine/features/fused_lora/test_apply.py engine/kernels"),
    Fault("engine/model_files.py", ", default=0) > DEEPEST", ", default=0) > 10000 * DEEPEST", "workbench/cli/test_check_model.py"),
    Fault("engine/models/adapters.py", "if any(len(shape) not in (2, 3)", "if any(len(shape) not in (1, 2, 3)", "engine/models/test_adapters.py"),
    Fault("engine/models/stored_packed/codes.py", "codes = torch.stack((found & 15, found >> 4), -1).view(", "codes = torch.stack((found >> 4, found & 15), -1).view(", "engine/models/stored_packed"),
    Fault("engine/models/strict_load.py", "if missing := sorted(", "if missing := () and sorted(", "engine/models/test_strict_load.py"),
    Fault("engine/planning/auto.py", "gpu.capability >= (8, 0)", "gpu.capability >= (9, 0)", "engine/planning engine/rules engine/session engine/trainers/test_auto_resolution.py"),
    Fault("engine/planning/auto.py", "return usual / 5, f", "return usual * 5, f", "engine/planning/test_auto.py"),
    Fault("engine/planning/estimate.py", "return -(-steps // config.run.eval_steps)", "return steps // config.run.eval_steps", "engine/planning/test_estimate.py"),
    Fault("engine/planning/estimate.py", "return checkpoint * (min(written, config.run.save_total_limit + 1) + best)", "return checkpoint * (written + best)", "engine/planning workbench/cli/test_estimate.py"),
    Fault("engine/planning/loading.py", "(3 if plain else 12)", "(12 if plain else 3)", "engine/planning/test_loading.py"),
    Fault("engine/planning/memory_model.py", "return min(gpu.memory_bytes", "return max(gpu.memory_bytes", "engine/planning/test_auto.py"),
    Fault("engine/planning/speed.py", "2 if config.optim.tf32 else 8", "8 if config.optim.tf32 else 2", "engine/planning/test_speed.py"),
    Fault("engine/rehearse.py", "(-widths[row], row)", "(widths[row], row)", "engine/run/test_rehearsal.py engine/trainers/test_rehearsal.py"),
    Fault("engine/rewards/builtin.py", "compiled.fullmatch(", "compiled.search(", "engine/rewards/test_builtin.py"),
    Fault("engine/rules/fit.py", "elif need > FIT * room:", "elif need > 10 * FIT * room:", "engine/rules/test_rules.py"),
    Fault("engine/rules/run.py", "need > 0.8 * free", "need > 8 * free", "engine/rules/test_rules.py"),
    Fault("engine/rules/training.py", "if rate > 20 * usual:", "if rate > 2 * usual:", "engine/rules/test_rules.py"),
    Fault("engine/rules/training.py", 'and config.model.dtype == "bfloat16" and not in_float32', 'and config.model.dtype != "bfloat16" and not in_float32', "engine/rules/test_rules.py"),
    Fault("engine/run/checkpoint.py", "return int(match[1]) if match", "return int(match[1]) + 1 if match", "engine/run/test_checkpoint.py"),
    Fault("engine/run/events.py", "last_segment + 1 if segment is None", "last_segment if segment is None", "engine/run/test_events.py"),
    Fault("engine/run/lock.py", 'if kernel == "busy" or _owner_lives', "if _owner_lives", "engine/run/test_lock.py"),
    Fault("engine/run/spawn.py", "return values if hub else {**values, NO_HUB_TOKEN: \"1\"}", "return values", "engine/run/test_spawn.py"),
    Fault("engine/run/task.py", "if self._cancelled:", "if not self._cancelled:", "engine/export/test_process.py"),
    Fault("engine/run/view.py", 'return self.state in ("finished", "stopped", "failed", "lost")', 'return self.state in ("finished", "stopped", "failed")', "engine/run"),
    Fault("engine/session/browsing.py", "key=lambda repo: -repo.last_accessed", "key=lambda repo: repo.last_accessed", "engine/session/test_browsing.py"),
    Fault("engine/session/chat.py", "if len({kind for kind, _ in kinds}) > 1:", "if len({kind for kind, _ in kinds}) > 2:", "engine/test_chat.py"),
    Fault("engine/session/consequences.py", "worse=costly and delta > 0", "worse=costly and delta < 0", "engine/session/test_build.py"),
    Fault("engine/session/conversation.py", '{} if answer.ended == "stop" else {"train": False}', '{} if answer.ended != "length" else {"train": False}', "engine/session/test_conversation.py"),
    Fault("engine/session/explain.py", "exact = [spec for spec in fields if spec.name == word]", "exact = [spec for spec in fields if spec.name.startswith(word)]", "engine/config/test_schema.py workbench/cli/test_explain.py"),
    Fault("engine/session/history.py", "return len(self._past) > 1", "return len(self._past) > 0", "engine/session/test_draft.py"),
    Fault("engine/session/recent.py", "max(when, newest.get(path, 0.0))", "min(when, newest.get(path, when))", "engine/session/test_recent.py"),
    Fault("engine/session/resume.py", "(data_record.files_unchanged(record) and", "(not data_record.files_unchanged(record) and", "end_to_end/test_resumed_rows.py"),
    Fault("engine/session/rows.py", "self._asked + ASK_SECONDS - time.monotonic()", "time.monotonic() - self._asked - ASK_SECONDS", "engine/session/test_rows.py"),
    Fault("engine/session/template.py", "self.problem and same else found", "self.problem else found", "engine/session/test_template.py"),
    Fault("engine/trainers/clock.py", "end.at - self._began - end.paused)", "end.at - self._began)", "engine/trainers/test_effects.py"),
    Fault("engine/trainers/kto.py", "return max(1.0, bad / good), max(1.0, good / bad)", "return max(1.0, good / bad), max(1.0, bad / good)", "engine/trainers/test_methods.py engine/trainers/test_losses.py"),
    Fault("engine/trainers/optimizers/galore.py", 'made.ortho_matrix, made.last_svd_step = found["basis"], found["renewed"]', 'made.last_svd_step = found["renewed"]', "engine/trainers/optimizers/test_building.py"),
    Fault("engine/trainers/receipt.py", "detail = \"; \".join(filter(None, (auto, replaced)))", "detail = replaced", "engine/trainers/test_receipt.py"),
    Fault("engine/trainers/replay.py", "apart.exp().clamp(max=self._most)", "torch.ones_like(apart)", "engine/trainers/test_replay.py"),
    Fault("engine/trainers/saving.py", 'if trainer.finite.on_nan != "go_on" or step >=', "if step >=", "engine/trainers/test_diverged.py"),
    Fault("widgets/compare.py", "if len(set(runs)) < len(runs)", "if len(runs) < len(set(runs))", "widgets/test_compare.py"),
    Fault("widgets/curves.py", ' and not name.startswith("gpu")', "", "widgets"),
    Fault("widgets/protocol.py", 'clean[: limit - 1] + "…"', "clean", "widgets"),
    Fault("widgets/telling.py", "newest = [samples[0], *newest[1:]]", "newest = [samples[0], *newest[:-1]]", "widgets/test_telling.py"),
    Fault("widgets/wire.py", "if choice not in spec.unsupported", "if choice", "widgets/test_form_messages.py"),
    Fault("widgets/workbench.py", "return max(_stamp(run)[0], _stamp(run)[2])", "return _stamp(run)[0]", "widgets/test_workbench_life.py"),
    Fault("workbench/assistants/consent.py", "if desk.allow_launch and not launch.code:", "if desk.allow_launch:", "workbench/assistants/test_server.py"),
    Fault("workbench/assistants/roots.py", 'real = Path(os.path.realpath(place))', 'real = Path(os.path.abspath(place))', "workbench/assistants/test_roots.py"),
    Fault("workbench/calling.py", "if run.path.parent == runs_dir()", "if run.path.parent != runs_dir()", "workbench/test_calling.py"),
    Fault("workbench/cli/compare.py", 'if len({run["method"] for run in runs}) > 1:', 'if len({run["method"] for run in runs}) > 2:', "workbench/cli/test_compare.py"),
    Fault("workbench/cli/following.py", 'view.best["step"] == entry["step"]', 'view.best["step"] != entry["step"]', "workbench/cli/test_following.py"),
    Fault("workbench/cli/output.py", ' and not os.environ.get("NO_COLOR")', "", "workbench/cli/test_output.py"),
    Fault("workbench/cli/queue.py", "(place or 1) - 1)", "(place or 1))", "workbench/cli/test_queue.py"),
    Fault("workbench/panels/chart.py", "centre = shown[1] if self.cursor is None else self.cursor", "centre = shown[1]", "workbench/panels/test_chart.py workbench/screens/test_monitor.py"),
    Fault("workbench/panels/curve.py", "0.9 * mean + 0.1 * value", "0.1 * mean + 0.9 * value", "workbench/panels/test_curve.py"),
    Fault("workbench/panels/run_table.py", "cut(text, room - end) + text[-end:]", "cut(text, room - end) + text[:end]", "workbench/panels/test_run_table.py"),
    Fault("workbench/screens/runs.py", "if not 2 <= len(runs) <= MOST", "if not 1 <= len(runs) <= MOST", "workbench/screens/test_runs.py workbench/screens/test_compare.py"),
    Fault("workbench/unsaved.py", "key=lambda kept: -kept.when", "key=lambda kept: kept.when", "workbench/test_unsaved.py"),
)  # fmt: skip


def broken(fault: Fault, copy: Path) -> str:
    """What stands in the file as it is, after the fault was put in; it must stand there once."""
    path = copy / fault.file
    text = path.read_text("utf-8")
    if text.count(fault.is_) != 1:
        raise SystemExit(f"{fault.file}: {fault.is_!r} stands there {text.count(fault.is_)} times")
    path.write_text(text.replace(fault.is_, fault.was), "utf-8")
    return text


def main(words: Sequence[str]) -> int:
    chosen = [fault for fault in FAULTS if not words or any(word in fault.file for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="seeded-faults-") as name:
        copy = Path(name) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "runs"))
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONSAFEPATH": "1"}
        for number, fault in enumerate(chosen, 1):
            whole, begun = broken(fault, copy), time.monotonic()
            paths = [str(copy / "tests" / path) for path in fault.tests.split()]
            argv = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow and not gpu", *paths]
            done = subprocess.run(argv, cwd=copy, env=environment, capture_output=True, text=True)
            (copy / fault.file).write_text(whole, "utf-8")
            by = [
                line.split()[1]
                for line in done.stdout.splitlines()
                if line.startswith(("FAILED", "ERROR")) and len(line.split()) > 1
            ]
            said = (
                f"found by {by[0]}"
                if done.returncode == 1 and by
                else f"NOT FOUND (pytest ended with {done.returncode})"
            )
            missed += not (done.returncode == 1 and by)
            print(f"{number}/{len(chosen)} {fault.file}: {said}, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
