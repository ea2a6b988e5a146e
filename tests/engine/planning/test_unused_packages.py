"""A worker starts without the packages that its run has no use for, and with every one that it asks for."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.files import as_yaml
from engine.planning.unused_packages import unused
from engine.rules import read
from engine.run.store import create
from tests.caches import own_cache

NOT_LOADED = [
    "wandb",
    "bitsandbytes",
    "torchao",
    "scipy",
    "sklearn",
    "tensorboard",
    "torch.utils.tensorboard",
    "matplotlib",
    "networkx",
    "IPython",
    "textual",
    "pytest",
    "pytorch_optimizer",
    "schedulefree",
    "gguf",
    "sentence_transformers",
    "torch._inductor.compile_fx",
    "torch._inductor.codecache",
    "torch._inductor.select_algorithm",
    "torch._functorch.aot_autograd",
    "torch._dynamo.testing",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.kto_trainer",
    "trl.trainer.reward_trainer",
    "engine.trainers.dpo",
    "engine.trainers.grpo",
    "engine.inspector",
    "engine.chat",
    "engine.export",
    "engine.session",
    "workbench",
    "widgets",
]
# A third of it on the machine where it was measured: 9 s, and 16 s with all that is installed.
MOST_CPU_SECONDS = 30.0
WORKER = """
import json, sys
from engine.worker import main
code = main(sys.argv[1])
print(json.dumps([code, sorted(name for name, module in sys.modules.items() if module is not None)]))
"""


def test_a_plain_run_takes_its_first_step_without_what_it_has_no_use_for(tmp_path):
    mapping = {
        "version": 1,
        "model": {"name": "builtin/tiny", "dtype": "float32"},
        "adapter": {"kind": "none"},
        "data": {"train": [{"path": "builtin/dates"}], "max_length": 128},
        "optim": {"max_steps": 1, "learning_rate": 0.001, "per_device_train_batch_size": 2},
    }
    run = create(tmp_path / "runs", as_yaml(mapping), {"method": "sft", "model": "builtin/tiny"})
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-P", "-c", WORKER, str(run.path)],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "WORKBENCH_CACHE": own_cache(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=170,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr[-3000:]
    code, loaded = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, run.events.read_text()[-2000:]
    assert {"torch", "trl.trainer.sft_trainer"} <= set(loaded)
    assert [name for name in NOT_LOADED if name in loaded] == []
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_CPU_SECONDS


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"run": {"report_to": ["wandb"]}}, "wandb"),
        ({"model": {"quantization": "nf4"}}, "bitsandbytes"),
        ({"optim": {"optim": "adamw_8bit"}}, "bitsandbytes"),
        ({"optim": {"optim": "q_galore_adamw_8bit"}}, "bitsandbytes"),
        ({"kernels": {"quantization_aware": True}}, "torchao"),
        ({"kernels": {"quantization_aware": "fp8"}}, "torchao"),
    ],
)
def test_what_a_config_asks_for_is_not_withheld(settings, package):
    plain = {"version": 1, "model": {"name": "builtin/tiny"}, "data": {"train": [{"path": "builtin/dates"}]}}
    assert package in unused(read(plain).config)
    asks = {**plain, **{name: {**plain.get(name, {}), **values} for name, values in settings.items()}}
    assert package not in unused(read(asks).config)


def test_weights_of_another_packages_format_keep_the_packages(tmp_path):
    """Whether in the model, in a reward model or in files that are not here and nobody has looked into."""
    folder = tmp_path / "stored"
    folder.mkdir()
    shape = {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (folder / "config.json").write_text(json.dumps(shape))
    for name, rewards in ((str(folder), None), ("builtin/tiny", str(folder)), ("some/where-far-away", None)):
        mapping = {"version": 1, "model": {"name": name}, "data": {"train": [{"path": "builtin/dates"}]}}
        if rewards is not None:
            mapping["method"] = {"kind": "grpo", "reward_funcs": [f"model:{rewards}"]}
        assert not {"bitsandbytes", "torchao"} & set(unused(read(mapping).config)), name
