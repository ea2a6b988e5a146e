"""The training process: `python -P -m engine.worker RUN_FOLDER`, or `--wait METHOD PACKAGES` to be given the folder later.

It reads the run's own config, builds the model, the data and the trainer, and leaves everything it does in the run
folder: events by rank 0, checkpoints that are whole or absent, a receipt before the first step. Under torchrun the same
file runs on every rank. Exit codes: 0 finished or stopped on request, 1 failed, 130 and 143 after SIGINT and SIGTERM.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import select
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from engine.compat.flight_recorder import last_collective
from engine.errors import Cancelled, Diverged, Redacting, WorkbenchError, redact, visible
from engine.figures import unit_of
from engine.run import checkpoint, inside, stack
from engine.run.async_writer import AsyncWriter
from engine.run.beat import Beat
from engine.run.control import STOPS, Controls
from engine.run.launch import versions
from engine.run.lock import RunLock, is_held
from engine.run.process import host
from engine.run.proposals import EARLY
from engine.run.spawn import forget_tokens
from engine.run.store import RunFolder
from engine.run.warm import TAKEN
from engine.trainers import comet, failure, libraries

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from engine.config.tree import RunConfig
    from engine.data.prepare import Prepared
    from engine.data.streaming.stream import Stream
    from engine.export.uploads import Uploads
    from engine.features.built import Notes
    from engine.features.sequence import Features
    from engine.models.load import Loaded
    from engine.trainers.job import Job
    from engine.trainers.run_trainer import RunTrainer
    from engine.trainers.watching import Watching

PROGRESS_SECONDS = 0.5
LEAVING_SECONDS = 10
"""How long the others are waited for once a run has ended well and said so."""
_SIGNAL_CODES = {"signal-SIGTERM": 143, "signal-SIGINT": 130}


def main(folder: str) -> int:
    """Trains the run in `folder` and returns the exit code. The lock, the events and the requests are rank 0's."""
    run = RunFolder(folder)
    if not os.path.lexists(run.config):
        print(f"{visible(folder)}: is no run's folder: it holds no config.yaml.", file=sys.stderr)
        return 1
    stack.listen(run)
    if (rank := int(os.environ.get("RANK", "0"))) > 0:
        with _log_of_its_own(run, rank), Beat(run, rank, last_collective) as beat:
            return _guarded(run, None, None, beat)
    with RunLock(run), AsyncWriter(run) as writer:
        checkpoint.collect(run)
        controls = Controls(run, writer)
        controls.listen(writer)
        controls.on_signals()
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return _guarded(run, writer, controls)
        with Beat(run, rank, last_collective) as beat:
            return _guarded(run, writer, controls, beat)


def leave_groups(code: int) -> int:
    """The exit code, once a rank that ended well has left its process groups: a thread of theirs that is still at work while
    the interpreter ends aborts the process. One that failed does not, since others may be gone by then; nor is any waited
    for longer than `LEAVING_SECONDS`, since NCCL's groups end together."""
    if code != 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch.distributed

        if torch.distributed.is_initialized():
            leaving = threading.Thread(target=torch.distributed.destroy_process_group, daemon=True)
            leaving.start()
            leaving.join(LEAVING_SECONDS)
    return code


@contextlib.contextmanager
def _log_of_its_own(run: RunFolder, rank: int) -> Iterator[None]:
    """Has what this rank prints stand in a file of its own too, line by line: in the worker's log all ranks' lines mix."""
    handle = inside.open_file(run, run.log_of(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with (
        open(handle, "w", encoding="utf-8", errors="backslashreplace", buffering=1) as log,
        contextlib.redirect_stdout(Redacting(sys.stdout, log)),
        contextlib.redirect_stderr(Redacting(sys.stderr, log)),
    ):
        where = f"local rank {os.environ.get('LOCAL_RANK', rank)} on {host()}"
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank}: process {os.getpid()}, {where}", file=log)
        yield


def wait(method: str, without: str) -> int:
    """Imports the libraries, without these packages, and trains the run whose folder comes through the socket at the
    standard input, with the run's log beside it. Returns 0 where none comes. An order that comes meanwhile is not kept
    waiting: the run imports the rest."""
    from engine.planning import unused_packages
    from engine.trainers.table import METHODS

    unused_packages.withhold(without.split(","))
    comet.quiet()
    line = socket.socket(fileno=os.dup(0))
    for name in (*libraries.EVERY_RUN, METHODS[method], *libraries.FOR_CONFIGS):
        if select.select([line], [], [], 0)[0]:
            break
        libraries.load(name)
    else:
        gc.freeze()
        line.send(b"ready")
    folder, logs, _, _ = socket.recv_fds(line, 1 << 16, 1)
    if not folder:
        return 0
    with contextlib.suppress(OSError), line:  # a supervisor that is gone is replaced; the run goes on
        line.send(TAKEN)
    for number in (1, 2):
        os.dup2(logs[0], number)
    os.close(logs[0])
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.chdir(folder)
    return main(folder.decode())


def _guarded(run: RunFolder, writer: AsyncWriter | None, controls: Controls | None, beat: Beat | None = None) -> int:
    """The process boundary: whatever goes wrong becomes one `failed` event, with the details in the log."""
    begun = time.monotonic()
    try:
        return _train_or_stop(run, writer, controls, begun, beat)
    except Exception as problem:  # noqa: BLE001 - the process boundary
        lines = redact(traceback.format_exc())
        print(visible(lines, lines=True), file=sys.stderr, flush=True)
        # Of a rank that is gone the supervisor tells, which knows the one and how it ended.
        if writer is not None and not failure.lost_rank(problem):
            cause, message = failure.cause_of(problem, run)
            # An error that is worded for people needs no lines of our code beside it; the log keeps them.
            traceback_lines = [] if isinstance(problem, WorkbenchError) else lines.strip().splitlines()[-12:]
            more: dict[str, Any] = {"step": problem.step} if isinstance(problem, Diverged) else {}
            if mends := failure.mends(problem):
                more["mends"] = mends
            writer.write("failed", cause=cause, message=message, lines=traceback_lines, **more)
        return 1


def _train_or_stop(
    run: RunFolder, writer: AsyncWriter | None, controls: Controls | None, begun: float, beat: Beat | None
) -> int:
    """Trains, or says that the run was stopped where a person asked for that before the first step."""
    try:
        return _train(run, writer, controls, begun, beat)
    except Cancelled:
        if writer is None or controls is None:
            return 0
    by, code = "", 0
    for request in controls.pending():
        if request.do in STOPS:
            controls.answer(request, "done", "stopped before the first step: there is nothing new to save")
            by, code = request.by, _SIGNAL_CODES.get(request.id, 0)
    newest, _ = checkpoint.newest_valid(run)
    step = (checkpoint.step_of(newest) if newest else 0) or 0
    writer.write("stopped", step=step, seconds=round(time.monotonic() - begun, 3), by=by)
    return code


def _train(
    run: RunFolder, writer: AsyncWriter | None, controls: Controls | None, begun: float, beat: Beat | None
) -> int:
    say = _Speaker(run, writer, controls)
    say.phase("Reading the config")
    config = _config(run)
    libraries.read_weights_ahead(config)
    say.phase("Loading the libraries")
    libraries.load_all(config)
    from engine.compat import process_switches

    with process_switches.restored(), _uploads(config, run, writer) as say.uploads:
        return _train_as(config, run, writer, controls, say, begun, beat)


@contextlib.contextmanager
def _uploads(config: RunConfig, run: RunFolder, writer: AsyncWriter | None) -> Iterator[Uploads | None]:
    """What sends checkpoints to a hub beside the training, begun while the token of the hub is here; None where nothing is sent."""
    if writer is None or not config.run.push_to_hub or run.read_json().get("rehearse"):
        yield None
        return
    from engine.export.uploads import Uploads

    with Uploads(run, config, writer) as uploads:
        yield uploads


def _train_as(
    config: RunConfig, run: RunFolder, writer: AsyncWriter | None, controls: Controls | None, say: _Speaker, begun: float,
    beat: Beat | None,
) -> int:  # fmt: skip
    """Trains as the config says, all libraries being there; returns the exit code."""
    from engine.features.built import Notes
    from engine.models.load import load_processing_class
    from engine.rehearse import Measuring
    from engine.trainers.auto_resolution import at_the_card

    module = _method(config, run)
    _pin_commits(run)
    say.phase("Loading the tokenizer")
    processing_class = load_processing_class(config)
    rehearsing = bool(run.read_json().get("rehearse"))
    config, prepared, held_out = _rows(run, config, processing_class, say, rehearsing)
    config, why = at_the_card(run, config, rows=prepared.facts)
    config = _at_most(config) if rehearsing else config
    _same_rows(run, prepared, held_out, processing_class, say)
    measuring = Measuring(prepared.dataset, *_rehearsed(config)) if rehearsing else None
    newest = _newest(run, say)
    say.phase("Loading the model")
    notes = Notes(run.path, why, say.listen)
    loaded, model, features = _model(config, processing_class, prepared, held_out, notes, newest)
    say.phase("Building the trainer")
    watching = _watching(run, writer, controls, config, newest, processing_class)
    rows = measuring.dataset if measuring else prepared.dataset
    job = _job(config, run, model, processing_class, rows, held_out, [watching, measuring] if measuring else [watching])
    trainer = _trainer(module, job, watching, run, prepared.fingerprint)
    if say.uploads is not None:
        trainer.checkpoints.on_commit = say.uploads.committed
    stream = prepared.stream if measuring is None else None
    if beat is not None:
        trainer.on_progress = beat.tick
    if say.uploads is not None and newest is not None:
        say.uploads.gone_on(checkpoint.step_of(newest) or 0)
    if newest is not None and stream is None and not config.data.ignore_data_skip:
        _report_other_batch_size(newest, trainer, say)
    _restore(trainer, job, stream, newest)
    features.apply(trainer.built(notes))
    built = functools.partial(_write_receipt, config, trainer, prepared, loaded, why, features.entries(), say)
    if trainer.is_fsdp_enabled:
        watching.before_first_step = built  # until then no weight is shared out
    else:
        built()
    forget_tokens()
    say.phase("Training")
    _run_steps(trainer, features, prepared, newest)
    for sentence in stream.left.sentences() if stream is not None else ():
        say.finding("data", sentence)
    if measuring is not None:
        say.write("rehearsed", **measuring.result())
        return 0
    return _end(trainer, watching, say, begun)


def _method(config: RunConfig, run: RunFolder) -> Any:
    """The method's module, once the libraries are quiet and seeded; under torchrun the process group exists after it,
    without which ranks could not wait for each other."""
    import transformers

    from engine.trainers.table import method

    transformers.utils.logging.set_verbosity_error()
    # Names that transformers renames between the versions we support; a person can do nothing about them.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    # Before the first product: cuBLAS reads its workspace's size once.
    seeded = transformers.enable_full_determinism if config.run.full_determinism else transformers.set_seed
    seeded(config.run.seed)
    module = method(config.method.kind)
    module.arguments(config, run.path)
    return module


def _pin_commits(run: RunFolder) -> None:
    """Models of the hub are those that the run began with."""
    from engine.hub import COMMITS, COMMITS_FILE

    known = inside.read(run, COMMITS_FILE) if inside.exists(run, COMMITS_FILE) else None
    COMMITS.keep(known, functools.partial(inside.replace, run, COMMITS_FILE))


def _rows(
    run: RunFolder, config: RunConfig, processing_class: Any, say: _Speaker, rehearsing: bool
) -> tuple[RunConfig, Prepared, Prepared | None]:
    """The prepared rows to train on and those held out, None where there are none; and the config, with the steps of a
    stream whose epochs are counted in it."""
    from engine.data.counting import SAMPLE, keep_counts
    from engine.data.prepare import prepare
    from engine.data.streaming.stream import open_stream, with_steps

    say.phase("Preparing the data")
    if config.data.streaming:
        first = os.environ.get("LOCAL_RANK", "0") == "0" and not rehearsing
        together = max(_rehearsed(config)[:2]) * int(os.environ.get("WORLD_SIZE", "1"))
        prepared = open_stream(config, processing_class, first=first, look=SAMPLE if rehearsing else together)
        config = config if rehearsing else with_steps(config, prepared.facts)
    else:
        prepared = _first_rank_first(lambda: prepare(config, processing_class, "train", say.progress))
    held_out = None
    if config.data.evaluates:
        held_out = _first_rank_first(lambda: prepare(config, processing_class, "eval", say.progress))
    if int(os.environ.get("RANK", "0")) == 0 and not config.data.streaming:
        keep_counts(config, run.path, prepared, held_out)
    for warning in (*prepared.warnings, *(held_out.warnings if held_out else ())):
        say.finding("data", warning)
    return config, prepared, held_out


def _same_rows(
    run: RunFolder, prepared: Prepared, held_out: Prepared | None, processing_class: Any, say: _Speaker
) -> None:
    """All processes learn from the same rows, and a resumed run from those it was trained on, or from others that a person has
    accepted."""
    from engine.data.compare import compare_with_record
    from engine.trainers.agreement import require_same_rows

    require_same_rows({"train": prepared, "eval": held_out})
    accepted = run.read_json().get("accept_data") is True
    if prepared.stream is not None:
        prepared.stream.accepted = accepted
    if int(os.environ.get("RANK", "0")) > 0:
        return
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    for sentence in compare_with_record(run, {"train": prepared, "eval": held_out}, tokenizer, accepted=accepted):
        say.finding("data", f"Goes on with other rows, as accepted: {sentence}.")


def _model(
    config: RunConfig,
    processing_class: Any,
    prepared: Prepared,
    held_out: Prepared | None,
    notes: Notes,
    newest: Path | None,
) -> tuple[Loaded, PreTrainedModel | PeftModel, Features]:
    """The model as it was loaded, then with its adapter and all that acts on it before there is a trainer, and what acted."""
    from engine.compat.compile_workers import start_ahead
    from engine.features.built import Built
    from engine.features.compile.gate import COPY
    from engine.features.load import load
    from engine.features.sequence import Features
    from engine.models.adapter_folder import beginning, load_adapter
    from engine.models.adapters import add_adapter
    from engine.models.vocabulary import refuse_tokens_without_weights
    from engine.trainers.finite import refuse_non_finite

    start_ahead(config)
    loaded = load(config)
    refuse_non_finite(loaded.model, config.model.name)
    rows = {"data.train": prepared.dataset, "data.eval": held_out.dataset if held_out else None}
    refuse_tokens_without_weights(config, loaded.model, processing_class, rows)
    model = add_adapter(loaded.model, config)
    if (begun := beginning(config, newest, COPY)) is not None:
        adapter = load_adapter(cast("PeftModel", model), config, begun)
        loaded = loaded if newest else replace(loaded, adapter=adapter)
    features = Features(config)
    features.prepare(Built(model, notes=notes))
    return loaded, model, features


def _job(
    config: RunConfig,
    run: RunFolder,
    model: PreTrainedModel | PeftModel,
    processing_class: Any,
    rows: Any,
    held_out: Prepared | None,
    callbacks: list[Any],
) -> Job:
    """All that a method builds its trainer from; the run's trackers know where it writes."""
    from engine.data.collate import collator_for
    from engine.trainers import trackers
    from engine.trainers.job import Job

    trackers.prepare(config, run.path)
    collator = collator_for(config, processing_class)
    evaluated = held_out.dataset if held_out else None
    return Job(config, run.path, model, processing_class, collator, rows, evaluated, callbacks)


def _trainer(module: Any, job: Job, watching: Watching, run: RunFolder, fingerprint: str) -> RunTrainer:
    """The method's trainer, with what every run adds: the best held-out score, steps that are not finite, checkpoints."""
    from transformers import PrinterCallback

    from engine.trainers.best import HeldOutBest
    from engine.trainers.finite import FiniteSteps

    config: RunConfig = job.config
    trainer: RunTrainer = module.build(job)
    watching.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    if job.eval is not None:
        watching.best = HeldOutBest(config, watching.writer)
        trainer.add_callback(watching.best)
    finite = FiniteSteps(config.run.on_nan, config.run.max_skipped_steps)
    info = _commit_info(run, fingerprint) | {"rows_a_step": _rows_a_step(trainer, config)}
    trainer.attach(run, watching.writer, config.run.save_total_limit, info, finite)
    return trainer


def _restore(trainer: RunTrainer, job: Job, stream: Stream | None, newest: Path | None) -> None:
    """Has the trainer read its rows from the stream, if there is one, and go on from the newest checkpoint."""
    from engine.models.vocabulary import check_of_rows

    if stream is not None:
        stream.check = check_of_rows(job.config, job.model, job.processing_class)
        trainer.read_from(stream)
    if newest is not None:
        trainer.restore(newest)
    if stream is not None and job.config.data.ignore_data_skip:
        stream.begin_epoch()


def _run_steps(trainer: RunTrainer, features: Features, prepared: Prepared, newest: Path | None) -> None:
    """Trains to the end, then takes the features back; nothing is left to do where the run was killed after its last step."""
    from engine.trainers.watching import AllStepsMade

    try:
        with contextlib.suppress(AllStepsMade):
            trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    except Exception:
        trainer.checkpoints.finish()
        raise
    finally:
        features.undo()
        if prepared.stream is not None:
            prepared.stream.close()


def _newest(run: RunFolder, say: _Speaker) -> Path | None:
    """The checkpoint to go on from; those that are skipped are named."""
    from engine.trainers.agreement import newest_of_all

    newest, skipped = newest_of_all(run)
    for path, reason in skipped:
        say.finding("checkpoints", f"{path.name} is skipped: {reason}")
    return newest


def _write_receipt(
    config: RunConfig,
    trainer: RunTrainer,
    prepared: Prepared,
    loaded: Loaded,
    why: dict[str, str],
    features: list[dict[str, Any]],
    say: _Speaker,
) -> None:
    """Writes the receipt. Raises WorkbenchError for a requested feature that touched nothing."""
    from engine.trainers.receipt import receipt, unmet

    _enable_checkpointing(trainer)
    entries = receipt(config, trainer, prepared, loaded, why) + features
    entries += say.uploads.ready() if say.uploads is not None else []
    say.write("receipt", entries=entries)
    if (sentence := unmet(config, entries)) is not None:
        raise WorkbenchError(sentence)


def _watching(
    run: RunFolder,
    writer: AsyncWriter | None,
    controls: Controls | None,
    config: RunConfig,
    newest: Path | None,
    processing_class: Any,
) -> Watching:
    """What writes the run's events while it trains, the model's answers to the pinned prompts among them."""
    from engine.data.tokens import chat_of
    from engine.generate import complete, prompts_of
    from engine.trainers.watching import Watching

    chat = chat_of(config, processing_class) if config.run.prompts else None
    prompts = prompts_of(processing_class, config.run.prompts, chat)

    def answers() -> list[str]:
        model = watching.trainer.accelerator.unwrap_model(watching.trainer.model)
        return complete(model, processing_class, prompts, max_new_tokens=config.run.max_new_tokens)

    opening = {
        "method": config.method.kind,
        "model": config.model.name,
        "resumed_from_step": checkpoint.step_of(newest) if newest else None,
        "devices": _devices(),
    }
    shown = config.run.logging_steps, config.run.prompts, cast(int, config.run.prompts_steps)
    watching = Watching(run, writer, controls, opening, *shown, answers)
    by_epoch = {
        "eval": config.run.evals_per_epoch if config.data.evaluates else None,
        "save": config.run.saves_per_epoch,
    }
    watching.per_epoch = {what: times for what, times in by_epoch.items() if times is not None}
    return watching


def _end(trainer: RunTrainer, watching: Watching, say: _Speaker, begun: float) -> int:
    step, seconds = trainer.state.global_step, round(time.monotonic() - begun, 3)
    stopped = watching.stopped
    trainer.checkpoints.wait()
    if trainer.finite.diverged is not None:
        raise trainer.finite.diverged
    if stopped is None:
        trainer._save_checkpoint(trainer.model, None)
        trainer.checkpoints.wait()
        _await_upload(trainer, say, step)
        early = watching.best is not None and watching.best.over and step < trainer.state.max_steps
        why = {"cause": EARLY, "message": watching.best.reason(step)} if early and watching.best else {}
        say.write("finished", step=step, seconds=seconds, **why)
        return 0
    # Who sends a signal, such as a machine that is taken away, leaves little time; who stops at once, none.
    _await_upload(
        trainer,
        say,
        step,
        stopped=True,
        hurried=stopped.hurried or stopped.id in _SIGNAL_CODES,
        now=stopped.do == "stop",
    )
    say.write("stopped", step=step, seconds=seconds, by=stopped.by)
    return _SIGNAL_CODES.get(stopped.id, 0)


def _await_upload(
    trainer: RunTrainer, say: _Speaker, step: int, *, stopped: bool = False, hurried: bool = False, now: bool = False
) -> None:
    """Waits until the last checkpoint has arrived at the hub; not `now`, and no longer than the grace of who is `hurried`."""
    if (uploads := say.uploads) is None:
        return
    if now or not uploads.sends_last(stopped=stopped) or not (trainer.run.checkpoints / f"checkpoint-{step}").is_dir():
        uploads.leave()
        return
    say.write("phase", name=uploads.phase)

    def look(done: int, total: int) -> str:
        trainer.on_progress()
        return say.sending(f"Sending checkpoint-{step}", done, total)

    uploads.finish(step, look, hurried=hurried)


def _config(run: RunFolder) -> RunConfig:
    """The run's config, no `auto` left: what the launch stored, and what was written into it by hand by the same facts.

    Raises WorkbenchError with the first error in it.
    """
    from engine.config.files import parse
    from engine.data.gather_facts import resolved_config

    return resolved_config(parse(run.read_config(), path=run.config).mapping, run.path, run.read_json().get("auto"))


def _rehearsed(config: RunConfig) -> tuple[int, int, int, int]:
    """Rows that one optimizer step takes on one device, those that answers are sampled for at once, the steps of a rehearsal
    and those that one sampling serves."""
    from engine.facts.counts import rehearsed_steps, sampled_together, steps_a_sampling

    batch = int(config.optim.per_device_train_batch_size)
    rows = batch * config.optim.gradient_accumulation_steps
    return rows, batch * sampled_together(config), rehearsed_steps(config), steps_a_sampling(config)


def _at_most(config: RunConfig) -> RunConfig:
    """The config of a step that takes the most: the answers of a rehearsal may teach nothing, those of the run do."""
    from engine.config.tree import fields

    skips = fields.method.skip_zero_advantage
    return config.with_values({skips: False}) if skips.applies(config) else config


def _enable_checkpointing(trainer: RunTrainer) -> None:
    """Gradient checkpointing as `train` would enable it, so that the receipt before the first step can count it."""
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs
        )


def _commit_info(run: RunFolder, fingerprint: str) -> dict[str, Any]:
    digest = hashlib.sha256(run.read_config().encode()).hexdigest()
    return {"config_hash": digest, "fingerprint": fingerprint, "versions": versions()}


def _rows_a_step(trainer: RunTrainer, config: RunConfig) -> int:
    """Rows, or answers, that all processes learn from in a step."""
    args = trainer.args
    own = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return int(own * args.world_size // config.distributed.context_parallel_size)


def _report_other_batch_size(newest: Path, trainer: RunTrainer, say: _Speaker) -> None:
    """Says so where a step learns from more rows than those before the checkpoint, or fewer: transformers counts its place in the
    rows in steps."""
    now, before = trainer.commit_info["rows_a_step"], (checkpoint.read_commit(newest) or {}).get("rows_a_step", 0)
    if before and before != now:
        rows = "left out" if now > before else "learned from twice"
        say.finding(
            "optim.gradient_accumulation_steps",
            f"A step learns from {now:,} rows now, and learned from {before:,} before {newest.name}. The place in the rows is counted "
            f"in steps, so some of this epoch's are {rows}; with as many rows a step as before none would be.",
        )


def _first_rank_first(work: Callable[[], Any]) -> Any:
    """Rank 0 does the work and fills the cache, then the others find it there."""
    from accelerate import PartialState

    with PartialState().main_process_first():
        return work()


def _devices() -> list[str]:
    """The names of the GPUs, those of the first node for each other one too, or `cpu` once for each process."""
    import torch

    if not torch.cuda.is_available():
        return ["cpu"] * int(os.environ.get("WORLD_SIZE", "1"))
    here = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return here * int(os.environ.get("GROUP_WORLD_SIZE", "1"))


class _Speaker:
    """Events before training begins, and the ear for who wants it to stop; other ranks say nothing and follow the first."""

    def __init__(self, run: RunFolder, writer: AsyncWriter | None, controls: Controls | None) -> None:
        self._run, self._writer, self._controls = run, writer, controls
        self._next = 0.0
        self.uploads: Uploads | None = None

    def write(self, kind: str, **payload: Any) -> None:
        if self._writer is not None:
            self._writer.write(kind, **payload)

    def listen(self) -> None:
        """Raises Cancelled where a person has asked that the run stop; on another rank where the first one has left, which
        may be asked once all have met."""
        if not is_held(self._run) if self._controls is None else self._controls.stop_waits():
            raise Cancelled("stopped before the first step")

    def _listen_first(self) -> None:
        if self._controls is not None:
            self.listen()

    def phase(self, name: str) -> None:
        self._listen_first()
        self.write("phase", name=name)

    def finding(self, path: str, message: str) -> None:
        self.write("finding", path=path, severity="warning", rule="at launch", message=visible(message))

    def progress(self, what: str, done: int, total: int) -> None:
        self._listen_first()
        now = time.monotonic()
        if now >= self._next or 0 < total <= done:
            self._next = now + PROGRESS_SECONDS
            self.write("progress", what=what, done=done, total=total, unit=unit_of(what))

    def sending(self, what: str, done: int, total: int) -> str:
        """Says how far the last upload is; why to wait for it no longer where somebody asks for that, else nothing."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_SECONDS
            self.write("progress", what=what, done=done, total=total, unit="bytes")
        why, controls = "", self._controls
        for request in controls.pending() if controls is not None else ():
            assert controls is not None
            if request.do in STOPS:
                why = f"{visible(request.by)} asked to wait no longer"
                controls.answer(request, "done", "the run is over, and what was being sent is given up")
            else:
                controls.answer(request, "refused", "the training is over")
        return why


if __name__ == "__main__":
    if len(sys.argv) != 2 and (len(sys.argv) != 4 or sys.argv[1] != "--wait"):
        sys.exit("usage: python -P -m engine.worker RUN_FOLDER, or --wait METHOD PACKAGES")
    sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)
    sys.exit(leave_groups(main(sys.argv[1]) if len(sys.argv) == 2 else wait(sys.argv[2], sys.argv[3])))
