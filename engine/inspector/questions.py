"""What can be asked, one function a question: its answer, or a `Job` for a child where it takes long."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.errors import WorkbenchError
from engine.inspector.children import Job, Params, Report
from engine.inspector.warm import Warm

PREVIEW_SECONDS = 30
PREVIEW_MEMORY = 2 << 30


def answer_to(warm: Warm, params: Params) -> Any:
    """The answer itself, or a `Job` for a child. Runs on the worker thread."""
    questions: dict[str, Callable[[Warm, Params], Any]] = {
        "hello": _hello,
        "rows": _raw_rows,
        "detect": _detect,
        "mapped": _mapped,
        "rendered": _rendered,
        "model": _model,
        "preview": _preview,
        "data": _data,
        "against": _against,
        "export_rows": _export_rows,
        "estimate": _estimate,
    }
    do = str(params.get("do"))
    if do not in questions:
        raise WorkbenchError(f"the inspector knows no {do}; it knows {', '.join(questions)}")
    return questions[do](warm, params)


def _hello(warm: Warm, params: Params) -> Any:
    """That it is there; with `warm` the libraries are imported now, so that the first preview is quick."""
    if params.get("warm"):
        import engine.data.preview
        import engine.models.load  # noqa: F401
    return {"pid": os.getpid(), "python": sys.version.split()[0], "nice": os.nice(0)}


def _raw_rows(warm: Warm, params: Params) -> Any:
    """Rows as they stand in the source, without torch: `path`, `start`, `count`."""
    rows = warm.rows(str(params["path"]), params.get("split"))
    start, count = int(params.get("start", 0)), int(params.get("count", 20))
    shown = []
    for index in range(start, start + count):
        try:
            shown.append({"index": index, "text": rows.text(index, 4096), "line": rows.place(index)[1]})
        except IndexError:
            break
    return {"rows": shown, "total": rows.length, "indexed": rows.progress, "note": rows.note, "kind": rows.kind}


def _detect(warm: Warm, params: Params) -> Any:
    """The format of one source, without torch: `path`, `format`, `columns`."""
    from engine.data.detect import detect

    rows = warm.rows(str(params["path"]), params.get("split"))
    detection = asdict(detect(rows, params.get("columns") or {}, params.get("format")))
    return {**detection, "rows": rows.length, "indexed": rows.progress}


def _mapped(warm: Warm, params: Params) -> Any:
    """What the first rows of a source say by a choice of columns, without torch."""
    from engine.data.column_map import mapped
    from engine.data.parts import columns_of

    names = columns_of(params.get("columns"), params.get("properties"), params.get("roles"))
    on_hub = {name: params.get(name) for name in ("subset", "revision")}
    return mapped(warm.rows(str(params["path"]), params.get("split"), **on_hub), names, params.get("format"))


def _rendered(warm: Warm, params: Params) -> Any:
    """A row as the chat template writes it, turn by turn: `row`, and `text` to try in the template's place."""
    from engine.data.preview import locate
    from engine.data.template_view import rendered

    config, number, text = _config(params), int(params.get("row", 0)), params.get("text")
    processing_class = warm.processing_class(config)
    plan = warm.plan(config, processing_class, "train")
    locate(plan, number)  # the index grows in this process
    return Job(lambda report: rendered(plan, processing_class, number, text), PREVIEW_SECONDS, PREVIEW_MEMORY)


def _model(warm: Warm, params: Params) -> Any:
    """What is known of a model: the facts of its config, its tokenizer and its chat template."""
    from engine.data.chat_template import GENERATION
    from engine.data.plan import template_of
    from engine.facts.model_shape import model_facts

    mapping = dict(params.get("config") or {"model": {"name": params["name"]}})
    config = _config({**params, "config": mapping})
    facts = model_facts(config.model.name)
    processing_class = warm.processing_class(config)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    template, name = template_of(config, processing_class)
    return {
        "name": config.model.name,
        "facts": asdict(facts) if facts is not None else None,
        "tokenizer": {
            "class": type(tokenizer).__name__,
            "size": len(tokenizer),
            "eos_token": tokenizer.eos_token,
            "bos_token": tokenizer.bos_token,
            "pad_token": tokenizer.pad_token,
            "exact_masks": bool(getattr(tokenizer, "is_fast", False)),
        },
        "template": {"name": name, "text": template, "marks": bool(template and GENERATION.search(template))},
    }


def _preview(warm: Warm, params: Params) -> Any:
    from engine.data.preview import choose, preview

    config, split = _config(params), str(params.get("split", "train"))
    processing_class = warm.processing_class(config)
    wanted, count = dict(params.get("rows") or {"kind": "index", "index": 0}), int(params.get("count", 1))
    kind = wanted.get("kind", "index")
    held_out = split == "eval" and config.data.val_set_size > 0
    if config.data.packing or held_out or kind in ("worst", "search"):
        return Job(lambda report: preview(config, processing_class, wanted, count, split, report))
    plan = warm.plan(config, processing_class, split)
    # The index grows in this process: what a child reads, rows and line numbers, must be known before it is forked.
    places = choose(processing_class, plan, wanted, count, None)
    for number, index in places:
        plan.sources[number].rows.size(index)
        plan.sources[number].rows.place(index)

    def learn(message: Any) -> None:
        # A fingerprint tokenizes 16 rows, most of what a preview of one row computes; it is empty while it is not known.
        if message["fingerprint"]:
            plan.known = (message["fingerprint"], message["warnings"])

    return Job(
        lambda report: preview(config, processing_class, wanted, count, split, report, plan, places),
        PREVIEW_SECONDS,
        PREVIEW_MEMORY,
        learn,
    )


def _data(warm: Warm, params: Params) -> Any:
    """Counts of both splits: over all rows, prepared and cached on the way, or over `sample` of them."""
    config = _config(params)
    processing_class = warm.processing_class(config)
    sample = params.get("sample")

    def run(report: Report) -> Any:
        from engine.data.counting import count, of_both
        from engine.data.stored_counts import store_counts
        from engine.facts.model_shape import model_facts

        facts = count(config, processing_class, "train", report, sample)
        facts = of_both(
            facts, count(config, processing_class, "eval", report, sample) if config.data.evaluates else None
        )
        if sample is None:
            store_counts(config, ".", model_facts(config.model.name, config.model.revision), facts)
        return facts

    return Job(run)


def _against(warm: Warm, params: Params) -> Any:
    """The rows of a config beside those that the run in the folder `run` was trained on: `split`, `numbers` or `count`."""
    config = _config(params)
    processing_class = warm.processing_class(config)
    split, numbers, count = str(params.get("split", "train")), params.get("numbers"), int(params.get("count", 3))

    def run(report: Report) -> Any:
        from engine.data.compare import against
        from engine.data.prepare import prepare
        from engine.data.streaming.stream import open_stream
        from engine.run.store import RunFolder

        splits = ("train", "eval") if config.data.evaluates else ("train",)
        now = {
            name: open_stream(config, processing_class, first=False)
            if name == "train" and config.data.streaming
            else prepare(config, processing_class, name, report)
            for name in splits
        }
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        return against(RunFolder(str(params["run"])), now, tokenizer, split, numbers, count)

    return Job(run)


def _export_rows(warm: Warm, params: Params) -> Any:
    """The prepared rows of `split` written to the file `place`."""
    config = _config(params)
    processing_class = warm.processing_class(config)

    def run(report: Report) -> Any:
        from engine.data.export_rows import export_rows

        return export_rows(config, processing_class, str(params["split"]), Path(str(params["place"])), report)

    return Job(run)


def _estimate(warm: Warm, params: Params) -> Any:
    """The closed-form estimate of a config on this machine; `engine.run.rehearsal` measures, in a process of its own."""
    from engine.data.gather_facts import gather_facts
    from engine.planning.estimate import estimate

    config = _config(params)
    return estimate(config, gather_facts(config)).as_json()


def _config(params: Params) -> Any:
    """The config of a question, with its paths made absolute from `base`."""
    from engine.config.files import absolute
    from engine.rules import read

    mapping = params.get("config") or {}
    if params.get("base"):
        mapping = absolute(mapping, params["base"])
    reading = read(mapping)
    for finding in reading.findings:
        # A default in the place of a bad value would show other tokens than the person asked for.
        if finding.path in reading.invalid and finding.path.split(".")[0] in ("model", "method", "data"):
            raise WorkbenchError(finding.message)
    return reading.config
