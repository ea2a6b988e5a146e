"""Arms whose ranks are processes of their own, one a card, that train and stand still between their turns.

`Ranks` starts them at once, so that imports of all arms go side by side and no card is touched before an arm is ordered to
begin. An order is a line of JSON at each rank's standard input, an answer one on a pipe; what a rank prints is in its log.
An arm is of a kind: `worker` is `engine.worker` itself, as torchrun starts it for a run, its weights drawn on the card in the
place of files and a callback added that holds it; `trl` is TRL's trainer with TRL's defaults, `trl alike` TRL's with the
settings of a run, `fully_shard` a loop of plain torch. A rank that loses its standard input leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Fell(Exception):
    """A rank failed, or did not answer in time."""


# -- who orders --------------------------------------------------------------------------------------------------------
class Ranks:
    """One arm: its processes, what they were ordered and what they answered."""

    def __init__(self, name: str, visible: tuple[str, ...], processes: int, logs: Path) -> None:
        """`visible` are the cards for CUDA_VISIBLE_DEVICES, none on a CPU. Starts the ranks, which import and wait."""
        from engine.run.devices import Choice
        from engine.run.spawn import environment, python

        self.name, self.processes = name, processes
        self.logs = [logs / f"{name.replace(',', '').replace(' ', '-')}-{rank}.log" for rank in range(processes)]
        given = environment(os.environ, Choice(visible, processes), "")
        given["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), given.get("PYTHONPATH"))))
        given |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        given.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.pipes: list[int] = []
        self.rests = [b""] * processes
        for rank, log in enumerate(self.logs):
            answers, its_end = os.pipe()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes,
                     "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"} if processes > 1 else {}  # fmt: skip
            with log.open("wb") as out:
                self.ranks.append(
                    subprocess.Popen(
                        [*python(), str(HERE / "_ranks.py"), str(its_end)],
                        stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=[its_end], start_new_session=True,
                        env={**given, **{key: str(value) for key, value in place.items()}},
                    )
                )  # fmt: skip
            os.close(its_end)
            self.pipes.append(answers)

    def order(self, do: str, **told: Any) -> None:
        """Tells all ranks. One that is gone is found by `answers`."""
        line = json.dumps({"do": do, **told}).encode() + b"\n"
        for rank in self.ranks:
            assert rank.stdin is not None
            with contextlib.suppress(OSError):
                rank.stdin.write(line)
                rank.stdin.flush()

    def begin(self, **told: Any) -> None:
        """Has them build what they train; they answer when it stands before its first step."""
        port = 0
        if self.processes > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
        self.order("begin", port=port, **told)

    def answers(self, until: float) -> list[dict[str, Any]]:
        """The next answer of each rank. Raises Fell for the first that failed, is gone, or is silent at `until`."""
        found: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as waiting:
            for rank, pipe in enumerate(self.pipes):
                waiting.register(pipe, selectors.EVENT_READ, rank)
            while len(found) < self.processes:
                for rank in range(self.processes):
                    line, end, rest = self.rests[rank].partition(b"\n")
                    if end and rank not in found:
                        found[rank], self.rests[rank] = json.loads(line), rest
                        if "failed" in found[rank]:
                            raise Fell(f"{self.name}: rank {rank}: {found[rank]['failed']}{self.last_words()}")
                if len(found) == self.processes:
                    break
                ready = waiting.select(max(0.0, min(1.0, until - time.monotonic())))
                if not ready:  # what a rank started may hold its pipe open
                    if time.monotonic() < until and all(rank.poll() is None for rank in self.ranks):
                        continue
                    if any(rank.poll() is not None for rank in self.ranks):
                        raise Fell(f"{self.name}: a rank is gone{self.last_words()}")
                    late = ", ".join(str(rank) for rank in range(self.processes) if rank not in found)
                    raise Fell(f"{self.name}: rank {late} did not answer in time{self.last_words()}")
                for key, _ in ready:
                    if not (read := os.read(key.fd, 1 << 16)):
                        code = self.ranks[key.data].wait(10)
                        raise Fell(f"{self.name}: rank {key.data} is gone, exit code {code}{self.last_words()}")
                    self.rests[key.data] += read
        return [found[rank] for rank in range(self.processes)]

    def steps(self, until: float, count: int, **told: Any) -> dict[str, Any]:
        """So many steps of all ranks: milliseconds of one by the slowest, MiB of the one that held most."""
        self.order("steps", n=count, **told)
        found = self.answers(until)
        most = {key: max(each[key] for each in found) for key in found[0] if isinstance(found[0][key], (int, float))}
        return {**found[0], **most}

    def last_words(self) -> str:
        """The ends of the logs: what is known of a failure where the machine does not stay."""
        said = []
        for log in self.logs:
            lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()][-12:]
            said += [f"    | {log.name}: {line[:300]}" for line in lines]
        return "".join(f"\n{line}" for line in said)

    def end(self) -> None:
        """Ends the ranks and what they started, at once: nothing they have is kept."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(10)
            if rank.stdin is not None:
                with contextlib.suppress(OSError):
                    rank.stdin.close()
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                os.close(pipe)
        self.ranks, self.pipes = [], []


# -- who is ordered ----------------------------------------------------------------------------------------------------
class Line:
    """The rank's end: orders come in, answers go out."""

    def __init__(self, answers: int) -> None:
        self._orders = os.fdopen(os.dup(0), "r")
        self._answers = os.fdopen(answers, "w", buffering=1)
        os.set_inheritable(answers, False)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)

    def tell(self, **told: Any) -> None:
        self._answers.write(json.dumps(told) + "\n")

    def hear(self) -> dict[str, Any]:
        order = self._orders.readline()
        if not order:
            os._exit(1)
        heard: dict[str, Any] = json.loads(order)
        return heard


class Turn:
    """What a rank does between orders: stands still, makes as many steps as it is told, and tells what they took."""

    def __init__(self, line: Line) -> None:
        self.line, self.left, self.count, self.saves = line, 0, 0, False
        self.first: dict[str, float] = {}
        """What the first step logged."""
        self.waited = 0.0
        """Seconds that the last checkpoint kept the training waiting."""
        self.parts: dict[str, float] = {}
        """What for."""
        self.beside: dict[str, float] = {}
        """Seconds of what was done with it beside the training."""
        self.settle: Callable[[], None] = lambda: None
        """Waits until a checkpoint that is written beside the training is whole."""

    def hold(self, **told: Any) -> None:
        import torch
        from _turns import CARD, wait

        self.line.tell(**told, **self.first)
        while (order := self.line.hear())["do"] != "steps":
            begun = time.perf_counter()
            self.settle()
            self.line.tell(settled=time.perf_counter() - begun, **self.beside)
        wait()
        if CARD:
            torch.cuda.reset_peak_memory_stats()
        self.left = self.count = order["n"]
        self.saves = bool(order.get("save"))
        self.begun = time.perf_counter()

    def step_over(self) -> bool:
        """Counts a step; whether it was the last one of the turn."""
        self.left -= 1
        return self.left == 0

    def over(self, **told: Any) -> None:
        """The turn is over: tells of it and stands still."""
        import torch
        from _turns import CARD, wait

        wait()
        took = (time.perf_counter() - self.begun) * 1e3 / self.count
        peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if CARD else (0, 0)
        self.hold(ms=took, peak_mib=peaks[0] / 2**20, reserved_mib=peaks[1] / 2**20, **told)


def holding(turn: Turn) -> Any:
    """The callback that holds a trainer."""
    from transformers import TrainerCallback

    class Holding(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turn.hold(device=device())

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if not turn.first and logs and "loss" in logs:
                turn.first = {"first_loss": float(logs["loss"]), "first_norm": float(logs.get("grad_norm", 0.0))}

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if turn.step_over():
                if turn.saves:
                    control.should_save = True  # and then `on_save`
                else:
                    turn.over()

        def on_save(self, *_: Any, **__: Any) -> None:
            turn.over(waited=turn.waited, **turn.parts)

    return Holding()


def device() -> str:
    import torch
    from _device import processor
    from _turns import CARD

    return torch.cuda.get_device_name() if CARD else processor()


def drawn(folder: str, dtype: Any, attention: str | None = None, loader: Any = None) -> Any:
    """A model of the folder's config with random weights, drawn on this rank's card; the same on every rank."""
    import torch
    from _turns import CARD
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(f"cuda:{torch.cuda.current_device()}" if CARD else "cpu"):
        return (loader or AutoModelForCausalLM).from_config(
            AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation=attention or "sdpa"
        )


def as_worker(order: dict[str, Any], turn: Turn) -> None:
    """A run's own process. Of the product only this is another: weights are drawn, and a callback holds the training."""
    from _turns import wait

    from engine import worker
    from engine.models import strict_load
    from engine.run import checkpoint
    from engine.run.store import RunFolder
    from engine.trainers import sharded

    def load(loader: Any, source: str, head: Any, **settings: Any) -> Any:
        return drawn(source, settings["dtype"], settings.get("attn_implementation"), loader)

    build, read = worker._trainer, worker._config

    def timed(module: Any, name: str, words: str) -> None:
        call = getattr(module, name)

        def clocked(*given: Any, **told: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*given, **told)
            finally:
                turn.beside[words] = time.perf_counter() - begun

        setattr(module, name, clocked)

    timed(sharded, "save_states", "beside: files written")
    timed(checkpoint, "commit", "beside: hashed and made durable")

    def trainer(*given: Any) -> Any:
        built = build(*given)
        save = built._save_checkpoint

        def saved(*args: Any) -> None:
            wait()
            begun = time.perf_counter()
            save(*args)
            turn.waited = time.perf_counter() - begun
            turn.parts = {f"wait: {name}": seconds for name, seconds in built.checkpoints.took.items()}

        built._save_checkpoint = saved
        turn.settle = built.checkpoints.wait
        built.add_callback(holding(turn))
        return built

    def config(run: Any) -> Any:
        found = read(run)
        for path, value in order["past"].items():
            section, name = path.split(".")
            found = found.model_copy(update={section: getattr(found, section).model_copy(update={name: value})})
        return found

    strict_load.load_strictly = load
    worker._trainer, worker._config = trainer, config
    code = worker.main(order["run"])
    events = RunFolder(order["run"]).events.read_text().splitlines()
    failed = [event["message"] for event in map(json.loads, events) if event["kind"] == "failed"]
    if not failed:
        time.sleep(2)  # the first rank says what it was
    raise RuntimeError(f"the run ended with exit code {code}. {' '.join(failed)}")


def as_trl(order: dict[str, Any], turn: Turn) -> None:
    """TRL's SFT as its documentation has it, sharded by accelerate's FSDP2, on rows that are tokens already. Its weights are
    in the format that all arms train; TRL's own default would train them in float32 under autocast."""
    import torch
    from _turns import CARD
    from datasets import load_dataset
    from transformers import AutoTokenizer, PrinterCallback
    from trl import SFTConfig, SFTTrainer

    # accelerate makes DDP of FSDP2 on a CPU.
    wrap = {"version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    fsdp: dict[str, Any] = {"fsdp": True, "fsdp_config": wrap} if CARD else {}
    arguments = SFTConfig(
        output_dir=order["place"], max_steps=100_000, per_device_train_batch_size=order["rows"],
        gradient_accumulation_steps=1, max_length=order["tokens"], bf16=False, save_strategy="no", report_to="none",
        disable_tqdm=True, learning_rate=order["learning_rate"], logging_first_step=True, use_cpu=not CARD, **fsdp,
    )  # fmt: skip
    model = drawn(order["model"], getattr(torch, order["dtype"]))
    rows = load_dataset("json", data_files=order["data"], split="train", cache_dir=order["place"])
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=rows, callbacks=[holding(turn)],
        processing_class=AutoTokenizer.from_pretrained(order["model"]),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def as_trl_alike(order: dict[str, Any], turn: Turn) -> None:
    """The library's trainer with the settings of a run of ours: what events, receipt and telemetry are held against."""
    import torch
    from _peers import plain_trainer
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback

    from engine.config.files import parse
    from engine.data.gather_facts import resolved_config
    from engine.models.adapters import add_adapter
    from engine.trainers.table import method

    config = resolved_config(parse(Path(order["config"]).read_text()).mapping, order["place"])
    arguments = method("sft").arguments(config, order["place"])
    arguments.save_strategy = "no"
    model = add_adapter(drawn(order["model"], getattr(torch, order["dtype"])), config)
    ids = [json.loads(line)["input_ids"] for line in Path(order["data"]).read_text().splitlines()]
    rows = Dataset.from_list([{"input_ids": each, "labels": each, "row": row} for row, each in enumerate(ids)])
    trainer = plain_trainer(config, arguments, model, AutoTokenizer.from_pretrained(order["model"]), rows)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(holding(turn))
    trainer.train()


def as_fully_shard(order: dict[str, Any], turn: Turn) -> None:
    """A loop of plain torch: each layer's checkpoint compiled and sharded by itself, loss compiled, AdamW, norms clipped."""
    import torch
    import torch.distributed as dist
    from _turns import CARD
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind, local = ("cuda", int(os.environ["LOCAL_RANK"])) if CARD else ("cpu", 0)
    place = torch.device(kind, local) if CARD else torch.device("cpu")
    if CARD:
        torch.cuda.set_device(place)
        dist.init_process_group("nccl", device_id=place)
    else:
        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(kind, (size,))
    model = drawn(order["model"], getattr(torch, order["dtype"]))
    layers = model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False)
        if order["compiled"]:
            layers[number] = torch.compile(layers[number])  # a module around it, so that messages stay outside
        fully_shard(layers[number], mesh=mesh, reshard_after_forward=True)
    if model.config.tie_word_embeddings:  # one weight is of one group
        fully_shard([model.model.embed_tokens, model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    else:
        fully_shard(model.model.embed_tokens, mesh=mesh)
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=order["learning_rate"], weight_decay=0.0, fused=True)

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    if order["compiled"]:
        loss_of = torch.compile(loss_of)
    ids = torch.tensor([json.loads(line)["input_ids"] for line in Path(order["data"]).read_text().splitlines()])
    batches = ids.split(order["rows"])
    model.train()
    turn.hold(device=device())
    for step in range(100_000):
        batch = batches[(step * size + rank) % len(batches)].to(place, non_blocking=True)
        loss = loss_of(model(input_ids=batch, use_cache=False).logits, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        if not turn.first:
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            mean = loss.detach() / size
            dist.all_reduce(mean)
            breaks = sum(torch._dynamo.utils.counters["graph_break"].values()) if order["compiled"] else 0
            turn.first = {"first_loss": float(mean), "first_norm": float(whole), "graph_breaks": breaks}
        if turn.step_over():
            turn.over()


KINDS = {"worker": as_worker, "trl": as_trl, "trl alike": as_trl_alike, "fully_shard": as_fully_shard}


def main() -> None:
    """One rank: imports, then what it is ordered."""
    line = Line(int(sys.argv[1]))
    try:
        import _peers  # noqa: F401 - imports of all kinds are made before the first order
        import torch
        import transformers

        from engine.trainers import libraries

        for name in (*libraries.EVERY_RUN, "engine.trainers.sft"):
            libraries.load(name)
        transformers.utils.logging.set_verbosity_error()
        line.tell(imported=True)
        order = line.hear()
        if order["port"]:
            os.environ["MASTER_PORT"] = str(order["port"])
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        KINDS[order["kind"]](order, Turn(line))
    except BaseException as problem:  # noqa: BLE001 - the rank's boundary: whoever ordered it hears why it is gone
        traceback.print_exc()
        lines = str(problem).strip().splitlines()
        where = "".join(traceback.format_exc().splitlines(keepends=True)[-14:])
        line.tell(failed=f"{type(problem).__name__}: {lines[0][:600] if lines else ''}\n{where}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
