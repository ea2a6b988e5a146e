"""The process that samples answers beside a training: `python -P -m engine.trainers.generating RUN_FOLDER`.

It loads the run's model by the run's config, as the training does, with the same features, and answers questions that come as
JSON lines through its input: prompts as ids, a seed, and the file of the adapter to answer by. It ends when its input does. What it
prints goes to the run's log. `engine.trainers.generating_process` is the other end.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from typing import TYPE_CHECKING, Any, TextIO

from engine.errors import Redacting, WorkbenchError, first_line
from engine.run import inside
from engine.run.store import RunFolder

if TYPE_CHECKING:
    from engine.config.tree import RunConfig
    from engine.trainers.async_rollouts import AheadTrainer


def main(folder: str) -> int:
    """Serves until its input ends; returns 1 where the model cannot be loaded."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # a training that is asked to stop saves first, and takes answers for that
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    run = RunFolder(folder)
    try:
        trainer = _loaded(run)
    except Exception as problem:  # noqa: BLE001 - the process boundary
        traceback.print_exc()
        _say(out, "ready", problem=_sentence(problem))
        return 1
    _say(out, "ready", device=trainer.accelerator.device.type)
    held = ""
    while True:
        asked = json.loads(lines.get())
        try:
            adapter = asked["adapter"]
            if adapter["sha256"] != held:
                _take(trainer, run, adapter)
                held = adapter["sha256"]
            ids, logps = trainer.answers_to(asked["prompts"], asked["seed"])
        except Exception as problem:  # noqa: BLE001 - the process boundary
            traceback.print_exc()
            _say(out, asked["mark"], problem=_sentence(problem))
        else:
            _say(out, asked["mark"], ids=ids, logps=logps)


def _listen(lines: queue.SimpleQueue[str]) -> None:
    """Takes questions from the input; where that ends, or the training died, so does this process, whatever it does."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _say(out: TextIO, mark: str, **answer: Any) -> None:
    out.write(json.dumps({"mark": mark, **answer}) + "\n")
    out.flush()


def _sentence(problem: Exception) -> str:
    if isinstance(problem, WorkbenchError):
        return str(problem)
    return f"{type(problem).__name__}: {first_line(problem)}"


def _take(trainer: AheadTrainer, run: RunFolder, adapter: dict[str, Any]) -> None:
    """Gives the model the weights of an adapter's file, where its own lie and in their format. Raises WorkbenchError for another
    file than was named, or one that does not fit."""
    import torch
    from safetensors.torch import load

    from engine.trainers.generating_process import adapter_weights

    file, data = adapter["file"], inside.read(run, adapter["file"])
    if hashlib.sha256(data).hexdigest() != adapter["sha256"]:
        raise WorkbenchError(f"{file}: is not the adapter of step {adapter['step']} that was written.")
    weights, own = load(data), adapter_weights(trainer)
    if weights.keys() != own.keys():
        name = sorted(weights.keys() ^ own.keys())[0]
        raise WorkbenchError(f"{file}: {'holds' if name in weights else 'lacks'} {name}, unlike the model.")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(weights[name])


def _loaded(run: RunFolder) -> AheadTrainer:
    """The method's trainer, which samples and never trains."""
    from engine.config.files import parse
    from engine.data.gather_facts import resolved_config
    from engine.hub import COMMITS, COMMITS_FILE
    from engine.trainers import libraries

    COMMITS.keep(inside.read(run, COMMITS_FILE) if inside.exists(run, COMMITS_FILE) else None, lambda _: None)
    config = resolved_config(parse(run.read_config(), path=run.config).mapping, run.path, run.read_json().get("auto"))
    libraries.load_all(config)  # what the training does without is not imported here either
    import transformers

    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    if config.run.full_determinism:
        transformers.enable_full_determinism(config.run.seed)
    return _built(config, run)


def _built(config: RunConfig, run: RunFolder) -> AheadTrainer:
    from datasets import Dataset

    from engine.data.collate import collator_for
    from engine.features.built import Built, Notes
    from engine.features.load import load
    from engine.features.sequence import Features
    from engine.models.adapters import add_adapter
    from engine.models.load import load_processing_class
    from engine.trainers.job import Job
    from engine.trainers.table import method

    config = _for_sampling(config)
    processing_class = load_processing_class(config)
    model = add_adapter(load(config).model, config)
    notes, features = Notes(run.path), Features(config)
    features.prepare(Built(model, notes=notes))
    # TRL wants rows; none of these is read.
    rows = Dataset.from_list([{"prompt": '""', "prompt_ids": [0], "row": 0}])
    job = Job(config, run.path, model, processing_class, collator_for(config, processing_class), rows)
    trainer: AheadTrainer = method(config.method.kind).sampler(job)
    trainer.attach(run, None, 1, {})
    features.apply(trainer.built(notes))
    trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
    trainer.model.train()  # as it samples within a training
    return trainer


def _for_sampling(config: RunConfig) -> RunConfig:
    """The config without what it takes to train: no reference, nothing asked for ahead, no layers computed again; and without what
    the training does by itself, held-out rows and trackers."""
    from engine.config.tree import fields

    values = {
        fields.method.async_prefetch: "none",
        fields.method.beta: 0.0,
        fields.memory.gradient_checkpointing: False,
        fields.data.eval: [],
        fields.data.val_set_size: 0,
        fields.run.report_to: [],
    }
    return config.with_values(values)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -P -m engine.trainers.generating RUN_FOLDER")
    sys.exit(main(sys.argv[1]))
