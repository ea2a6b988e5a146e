"""One family's way through the workbench, in this process: each station says `✓`, or why not.

    python -m tests.families.walk FAMILY FOLDER TOKENIZER

What a library or the engine raises is caught on purpose: a page of a family that fails says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.families.models import FAMILIES, built

YES = "✓"
STATIONS = (
    "check",
    "estimate",
    "preview",
    "lora",
    "full",
    "qlora",
    "resume",
    "adapter",
    "merged",
    "whole",
    "gguf",
    "chat",
)
"""What a family passes, in this order: the columns of the page."""
STEPS, KEPT = 3, 2
"""Optimizer steps of a run, and the checkpoint that it is taken up from again."""
ROWS = [
    {"messages": [
        {"role": "user", "content": f"What comes after {number}?"},
        {"role": "assistant", "content": f"It is {number + 1}."},
    ]}
    for number in range(16)
]  # fmt: skip
TEXTS = [{"text": f"{number} is followed by {number + 1}, and that by {number + 2}."} for number in range(16)]
PAIRS = [{"anchor": f"What comes after {number}?", "positive": f"It is {number + 1}."} for number in range(16)]
NEAR = 1e-4
"""Logits of two ways to compute one model in float32 are further apart by no more, of their spread."""


class Wrong(Exception):
    """Something that was computed is not what it should be."""


def walk(name: str, root: Path, tokenizer: Path, stations: Sequence[str] = STATIONS) -> dict[str, str]:
    """What each station says of this family. `WORKBENCH_CACHE` should be a cache of its own."""
    way = Way(name, root, tokenizer)
    return {station: _said(getattr(way, station)).replace(f"{root}/", "") for station in stations}


def _said(station: Callable[[], str | None]) -> str:
    from engine.errors import WorkbenchError

    try:
        return station() or YES
    except Wrong as problem:
        return f"wrong: {problem}"
    except WorkbenchError as problem:
        return f"refused: {problem.message}"
    except Exception as problem:
        traceback.print_exc(file=sys.stderr)
        return (
            f"fails: {type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"[
                :300
            ]
        )


class Way:
    """A folder of the family, its rows, and the runs that were made of it."""

    def __init__(self, name: str, root: Path, tokenizer: Path) -> None:
        self.name, self.family, self.root = name, FAMILIES[name], root
        root.mkdir(parents=True, exist_ok=True)
        self.folder = built(name, tokenizer, root / "model")
        self.rows = self._rows()
        self.runs: dict[str, Any] = {}
        self.beside: set[str] = set()

    def _rows(self) -> Path:
        family, path = self.family, self.root / "rows.jsonl"
        rows: list[Any] = PAIRS if family.method == "embedding" else ROWS if family.talks else TEXTS
        if family.sees:
            from PIL import Image

            # Not of one colour: where no position is added to patches, attention over equal ones teaches no query and no key.
            Image.linear_gradient("L").resize((40, 30)).convert("RGB").save(self.root / "cat.png")
            rows = [
                {"messages": [{**ask, "content": f"<image>{ask['content']}"}, reply], "images": ["cat.png"]}
                for ask, reply in (row["messages"] for row in ROWS)
            ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def mapping(self, **more: dict[str, Any]) -> dict[str, Any]:
        """The config of a run, as its file has it; what is not named is as the workbench chooses."""
        kind = self.family.method if self.family.talks or self.family.method != "sft" else "pretrain"
        # As a launch writes it: no `auto` is left in a run.
        sees = self.family.sees and importlib.util.find_spec("torchvision")
        read_by = {"image_backend": "torchvision"} if sees else {}
        return {
            "version": 1,
            "model": {"name": str(self.folder), "dtype": "float32", **more.get("model", {})},
            "method": {"kind": kind},
            "data": {
                "train": [{"path": str(self.rows)}], "max_length": 1024 if self.name == "cohere2" else 128, **read_by,
            },
            "adapter": more.get("adapter", {"kind": "lora", "r": 4}),
            "optim": {
                "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
                "learning_rate": 1e-3,
            },
            "run": {"save_steps": 1, "save_total_limit": 9, "logging_steps": 1},
        }  # fmt: skip

    # -- before a run --------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """No rule finds an error in a plain config of this family."""
        self._read(self.mapping())

    def _read(self, mapping: dict[str, Any]) -> tuple[Any, Any]:
        from engine.data.gather_facts import gather_facts
        from engine.errors import WorkbenchError
        from engine.rules import read

        facts = gather_facts(read(mapping).config, self.root)
        reading = read(mapping, facts)
        for finding in reading.findings:
            if finding.severity == "error":
                raise WorkbenchError(finding.message)
        return reading.config, facts

    def estimate(self) -> str | None:
        """Numbers of the model, of its adapter, and of the model known by its config alone, are those of the real one."""
        from engine.facts.counts import parameters
        from engine.facts.model_shape import model_facts
        from engine.planning.auto import resolved

        config, facts = self._read(self.mapping())
        known = parameters(resolved(config, facts), facts)
        model = self._plain(self.folder)
        weights = sum(each.numel() for each in model.parameters())
        # A folder's files hold what it computes with and never trains, too.
        real = weights + sum(each.numel() for name, each in model.named_buffers() if name in model.state_dict())
        if facts.model.parameters != real:
            raise Wrong(f"{facts.model.parameters} parameters of {real}")
        alone = self.root / "alone"
        alone.mkdir(exist_ok=True)
        shutil.copy(self.folder / "config.json", alone)
        told = model_facts(str(alone))
        assert told is not None
        if told.parameters is not None and told.parameters not in (weights, real):
            raise Wrong(f"by its config alone {told.parameters} parameters of {real}")
        if known is None:
            return "the model's numbers; an adapter's are not known before it is built"
        trained = self._receipt(self.run("lora"), "trainable parameters")["effective"]
        if known.trained != trained:
            raise Wrong(f"an adapter of {known.trained} parameters, and it has {trained}")
        return None if told.parameters else "✓ (from the weights' files)"

    def preview(self) -> None:
        """What is learned is the answer and the mark that ends it, and nothing of what was asked."""
        from engine.data.preview import preview
        from engine.models.load import load_processing_class

        config, _ = self._read(self.mapping())
        words = load_processing_class(config)
        shown = preview(config, words, {"kind": "index", "index": 3}, 2)
        for number, row in enumerate(shown["rows"], 3):
            if "error" in row:
                raise Wrong(row["error"])
            parts = row["parts"]
            if self.family.method == "embedding":
                tokens = parts["positive"]
                if f"It is {number + 1}." not in "".join(each["text"] for each in tokens):
                    raise Wrong(f"a text is shown as {tokens}")
                continue
            learned = "".join(each["text"] for each in parts["input"] if each["trained"])
            self._learned(learned, number)

    def _learned(self, learned: str, number: int) -> None:
        if not self.family.talks:
            if not learned.strip().endswith(f"and that by {number + 2}.{self.family.eos}"):
                raise Wrong(f"of a text it learns {learned!r}")
            return
        answer = f"It is {number + 1}."
        before, found, after = learned.partition(answer)
        if not found or "What comes" in learned:
            raise Wrong(f"of an answer it learns {learned!r}")
        ends = self.family.ends or (self.family.eos,)
        if not self.family.open_ended and after.strip() not in ends:
            raise Wrong(f"after the answer it learns {after!r}")
        if before.strip() and not before.strip().startswith("<"):
            raise Wrong(f"before the answer it learns {before!r}")

    # -- runs ----------------------------------------------------------------------------------------------------------
    def run(self, kind: str) -> Any:
        """The run of this kind, made once."""
        if kind not in self.runs:
            more: dict[str, dict[str, Any]] = {
                "lora": {},
                "full": {"adapter": {"kind": "none"}},
                "qlora": {"model": {"quantization": "nf4"}},
            }[kind]
            mapping = self.mapping(**more)
            self._read(mapping)
            self.runs[kind] = self._train(mapping, kind)
        if isinstance(self.runs[kind], Exception):
            raise self.runs[kind]
        return self.runs[kind]

    def _train(self, mapping: dict[str, Any], kind: str) -> Any:
        from engine.config.files import as_yaml
        from engine.run.store import create

        folder = create(self.root / "runs", as_yaml(mapping), {"name": kind, "method": "sft", "model": self.name})
        try:
            self._work(folder)
        except Exception as problem:
            return problem
        return folder

    def _work(self, folder: Any) -> None:
        from engine.errors import WorkbenchError
        from engine.worker import main

        with _handlers_kept():
            code = main(str(folder.path))
        if code:
            failed = _events(folder, "failed")[-1]
            said = failed["message"]
            if failed["cause"] == "exception":
                print("\n".join(failed["lines"]), file=sys.stderr)
                raise RuntimeError(said)
            raise WorkbenchError(said)

    def _receipt(self, folder: Any, name: str) -> dict[str, Any]:
        entries = _events(folder, "receipt")[-1]["entries"]
        found: dict[str, Any] = next(each for each in entries if each["feature"] == name)
        return found

    def lora(self) -> str | None:
        """A short run with an adapter on every linear layer, all of which are moved."""
        from safetensors.torch import load_file

        run = self.run("lora")
        first, last = (load_file(self._at(run, step) / "adapter_model.safetensors") for step in (1, STEPS))
        _finite(run)
        still = sorted(key for key in last if first[key].equal(last[key]))
        dead = sorted(key for key, value in last.items() if not value.any())
        if still or dead:
            raise Wrong(
                f"{len(still or dead)} of {len(last)} weights of the adapter do not learn: {(still or dead)[0]}"
            )
        return None

    def full(self) -> str | None:
        """A short run of all weights, each of which is moved."""
        from safetensors.torch import load_file

        run = self.run("full")
        _finite(run)
        first, last = (_weights(self._at(run, step), load_file) for step in (1, STEPS))
        still = sorted(key for key in last if last[key].is_floating_point() and first[key].equal(last[key]))
        if self.family.method == "embedding":  # it is pooled from hidden states, not by a pooler of the model's own
            still = [key for key in still if not key.startswith("pooler.")]
        still = [key for key in still if ".experts." not in key and not self._never_learns(key)]  # no token came to one
        if still:
            raise Wrong(f"{len(still)} of {len(last)} weights do not learn: {still[0]}")
        return None

    def _never_learns(self, key: str) -> bool:
        """Whether it is one of the numbers that a model has beside its weights."""
        self.beside = self.beside or {name for name, _ in self._plain(self.folder).named_buffers()}
        return any(name.rpartition(".")[2] == key.rpartition(".")[2] for name in self.beside)

    def qlora(self) -> None:
        """The same beside weights of four bits."""
        run = self.run("qlora")
        _finite(run)
        if "4" not in str(self._receipt(run, "quantization")["effective"]):
            raise Wrong("nothing is held in four bits")

    def resume(self) -> None:
        """Taken up again after its checkpoint, losses and weights are those of the run that was never stopped."""
        from safetensors.torch import load_file

        from engine.run.store import RunFolder

        for kind in ("lora", "full"):
            whole = self.run(kind)
            where = self.root / f"again-{kind}"
            shutil.copytree(whole.path, where)
            again = RunFolder(where)
            for step in range(1, STEPS + 1):
                if step != KEPT:
                    shutil.rmtree(self._at(again, step))
            kept = [line for line in again.events.read_text().splitlines() if json.loads(line).get("step", 0) <= KEPT]
            again.events.write_text("\n".join(kept) + "\n")
            self._work(again)
            ours, theirs = (
                [
                    (each["step"], each["loss"], each["grad_norm"])
                    for each in _events(run, "metrics")
                    if each["step"] > KEPT
                ]
                for run in (again, whole)
            )
            if ours != theirs:
                raise Wrong(f"{kind}: losses after it {ours}, and without it {theirs}")
            name = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
            first, second = (load_file(self._at(run, STEPS) / name) for run in (again, whole))
            if any(not first[key].equal(second[key]) for key in second):
                raise Wrong(f"{kind}: weights after it are others than without it")
            shutil.rmtree(where)

    def _at(self, run: Any, step: int) -> Path:
        path: Path = run.checkpoints / f"checkpoint-{step}"
        return path

    # -- after a run ---------------------------------------------------------------------------------------------------
    def adapter(self) -> None:
        """The adapter's folder, opened by plain PEFT, has the logits of the merged one."""
        place = self._export("lora", "adapter")
        ours, theirs = (
            self._logits(self._with_adapter(place)),
            self._logits(self._plain(self._export("lora", "safetensors"))),
        )
        _same(ours, theirs, "an adapter opened by PEFT and the merged model")
        if _apart(ours, self._logits(self._plain(self.folder))) < 1e-6:
            raise Wrong("the adapter changes no logit")

    def merged(self) -> None:
        """The merged folder, opened by plain transformers, has the names and shapes of the base's."""
        from safetensors.torch import load_file

        place = self._export("lora", "safetensors")
        base, made = _weights(self.folder, load_file), _weights(place, load_file)
        if base.keys() != made.keys():
            raise Wrong(f"weights {sorted(base.keys() ^ made.keys())[:3]}")

    def whole(self) -> None:
        """The model of a run of all weights, exported, has the logits of its checkpoint."""
        place = self._export("full", "safetensors")
        ours, theirs = (self._logits(self._plain(each)) for each in (place, self._at(self.run("full"), STEPS)))
        _same(ours, theirs, "the exported model and the checkpoint")

    def gguf(self) -> None:
        """One file for llama.cpp, compared weight by weight."""
        from engine.errors import WorkbenchError

        if self.family.method == "embedding":
            raise WorkbenchError("a model of embeddings is no file for llama.cpp here")
        try:
            self._export("lora", "gguf")
        except WorkbenchError as problem:
            # The sentence goes on with all types that are; one more of them is no news of this family.
            if "is not written as GGUF here" in problem.message:
                raise WorkbenchError("no GGUF is written of this model type here") from problem
            raise

    def chat(self) -> str | None:
        """The trained model and its base answer."""
        if self.family.method == "embedding":
            return "none: it embeds"
        from engine.chat.answering import Sampling, answer
        from engine.chat.models import load_sides

        run = self.run("lora")
        asked = [{"title": "base", "run": run.path}, {"title": "tuned", "run": run.path, "checkpoint": STEPS}]
        for side in load_sides(asked, lambda _: None):
            said = answer(
                side, [{"role": "user", "content": "What comes after 3?"}], (), Sampling(max_new_tokens=3),
                lambda *_: None, threading.Event(),
            )  # fmt: skip
            if not said["tokens"]:
                raise Wrong(f"{side.title} says nothing")
            self._greedy(side, said["ids"])
        return None

    def _greedy(self, side: Any, ids: list[int]) -> None:
        """Its tokens are the likeliest ones of a plain pass over all before them."""
        import torch

        from engine.chat.answering import rendered

        _, prompt = rendered(side, [{"role": "user", "content": "What comes after 3?"}])
        with torch.no_grad(), side.active():
            for number, each in enumerate(ids):
                logits = side.model(input_ids=torch.tensor([[*prompt, *ids[:number]]]), use_cache=False).logits[0, -1]
                if logits.max() - logits[each] > NEAR * logits.std():
                    raise Wrong(f"token {number + 1} of an answer is not the likeliest without a cache")

    def _export(self, kind: str, form: str) -> Path:
        from engine.export.__main__ import _config
        from engine.export.folder import Model
        from engine.export.making import make
        from engine.export.places import places, source

        run = self.run(kind)
        at = self.root / f"export-{kind}"
        place = places(run, [form], at)[form]
        if not place.exists():
            made = Model(source(run), _config(run))
            make(made, form, place, {"quant": "F16", "places": {form: str(place)}}, lambda *_: None)
        return place

    def _loader(self) -> Any:
        import transformers

        if self.family.method == "embedding":
            return transformers.AutoModel
        return transformers.AutoModelForImageTextToText if self.family.sees else transformers.AutoModelForCausalLM

    def _plain(self, folder: Path) -> Any:
        import torch

        model, told = self._loader().from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        lost = sorted(told["missing_keys"]) + sorted(told["unexpected_keys"])
        if lost:
            raise Wrong(f"opened by transformers, the folder lacks or has besides {lost[:3]}")
        return model.eval()

    def _with_adapter(self, place: Path) -> Any:
        import warnings

        from peft import PeftModel

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(self._plain(self.folder), place)
        for each in told:
            if "missing adapter keys" in str(each.message):
                raise Wrong(f"PEFT: {each.message}"[:200])
        return model.eval()

    def _logits(self, model: Any) -> Any:
        import torch

        ids = torch.tensor([[40 + (7 * place) % 900 for place in range(24)]])
        with torch.no_grad():
            out = model(input_ids=ids)
        return out.logits if hasattr(out, "logits") else out.last_hidden_state


def _weights(folder: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    return {name: value for file in sorted(folder.glob("model*.safetensors")) for name, value in read(file).items()}


def _finite(run: Any) -> None:
    losses = [each["loss"] for each in _events(run, "metrics")]
    if len(losses) != STEPS or not all(0 < loss < 50 for loss in losses):
        raise Wrong(f"losses {losses}")


def _events(run: Any, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run.events.read_text("utf-8").splitlines()]
    return [event for event in found if event["kind"] == kind]


def _apart(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).abs().max() / theirs.std())


def _same(ours: Any, theirs: Any, what: str) -> None:
    if (found := _apart(ours, theirs)) > NEAR:
        raise Wrong(f"{what} differ by {found:.1e}")


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    print(json.dumps(walk(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))), flush=True)
