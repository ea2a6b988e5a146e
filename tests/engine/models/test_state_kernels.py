"""A package whose kernels would raise for a model is left out of it, and no longer than that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.engine.features.attention_backend.test_documents_as_rows import made
from tests.prestarted import prestarted

STUB = """
import torch
calls = []

def chunk_gated_delta_rule(q, k, v, g, beta, **kwargs):
    calls.append(q.shape[1])
    return torch.zeros_like(v), None

fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
"""
SCRIPT = """
import json, sys
import torch, transformers
from engine.compat.state_kernels import computed_by
from engine.models.load import load_pretrained
from engine.rules import read

reading = read({"version": 1, "model": {"name": sys.argv[1], "dtype": "float32"}, "data": {"train": [{"path": "a.jsonl"}]}})
loaded = load_pretrained(reading.config)
loaded.model(input_ids=torch.tensor([[5, 6, 7]]))
from fla.ops.gated_delta_rule import calls
before = len(calls)
other = transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**json.loads(sys.argv[2])))
other(input_ids=torch.tensor([[5, 6, 7]]))
print(json.dumps([loaded.without_kernels, computed_by(loaded.model), before, computed_by(other), calls]))
"""


def test_an_installed_package_is_left_out_of_a_model_that_it_would_fail_and_told_where_it_is_called(
    tmp_path: Path,
) -> None:
    """On a machine without a GPU, as here: transformers alone would call the kernels on the CPU, where they raise."""
    site, model = tmp_path / "site", made("qwen3_5_text")
    for folder in (ops := site / "fla" / "ops" / "gated_delta_rule", site / "flash_linear_attention-0.6.0.dist-info"):
        folder.mkdir(parents=True)
    for folder in (site / "fla", ops.parent):
        (folder / "__init__.py").touch()
    (ops / "__init__.py").write_text(STUB)
    (site / "flash_linear_attention-0.6.0.dist-info/METADATA").write_text(
        "Name: flash-linear-attention\nVersion: 0.6.0\n"
    )
    model.save_pretrained(tmp_path / "model")
    like = {**made("olmo_hybrid").config.to_dict()}
    arguments = [sys.executable, "-P", "-c", SCRIPT, str(tmp_path / "model"), json.dumps(like, default=str)]
    search = os.pathsep.join((str(site), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": "", prestarted.WARM: "1"}
    prestarted.wait()
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    reason, withheld, before, taken, calls = json.loads(done.stdout.splitlines()[-1])
    assert reason == "its kernels are for GPUs"
    assert withheld["chunk_gated_delta_rule"] == ["transformers", 1]
    assert before == 0
    assert taken["chunk_gated_delta_rule"] == ["fla", 1]
    assert calls == [3]
