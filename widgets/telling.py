"""A run in words, part by part, as a monitor shows it: clipped, without secrets, hidden characters visible.

Pure functions of a view. Each part is plain JSON, so that its mark tells whether it changed and it travels only then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import redact, visible
from engine.export.llama_cpp import makes_k_quants, offered_quants
from engine.export.places import forms_of
from engine.figures import plain, size
from engine.run import proposals, silence
from engine.run.best import best_text
from engine.run.curves import concern, told_by, watch_for
from engine.run.ending import End
from engine.run.expert_load import explained, picture
from engine.run.phases import TITLE, before_first_step
from engine.run.pruning_choice import Choice, Kept
from engine.run.stopping import ways
from engine.run.store import RunFolder
from engine.run.view import RunView
from engine.session.run_messages import NO_RECEIPT, NO_SAMPLES, NO_WORDS, damaged, replay_text, sample_time
from widgets.protocol import shown

SAMPLE_PROMPTS, SAMPLE_ANSWERS = 8, 6
GROUPS, GROUP_COMPLETIONS = 40, 16
COMPLETION_CHARACTERS = 1200
PHASES = 20
EXPERT_COLUMNS = 140


def way(view: RunView) -> dict[str, Any] | None:
    """The way to the first step while there is none: of each phase its word, whether it is done, now or later, and its time."""
    phases = before_first_step(view)[-PHASES:]
    if not phases:
        return None
    return {"title": TITLE, "phases": [[shown(each.word, 60), each.state, each.time] for each in phases]}


def head(view: RunView) -> dict[str, Any]:
    took = view.seconds if view.over else None
    asked = ways(view) if view.state in ("starting", "running") else []
    bad = view.state in ("failed", "lost")
    return {
        "state": view.state,
        "name": visible(view.id),
        "method": visible(view.method),
        "model": shown(view.model, 120),
        "max_steps": view.max_steps,
        "took": took,
        "by": shown(_end(view), 300) if view.state in ("stopped", "finished") else "",
        "cause": shown(view.cause or "it ended without a word", 600) if bad else "",
        "lines": [shown(line, 300) for line in view.cause_lines[-8:]] if bad else [],
        "warnings": [
            *(shown(restart["message"], 300) for restart in view.restarts[-2:]),
            *(shown(f"step {restart['step']}: {restart['what']}", 200) for restart in view.diverged[-3:]),
            *(shown(str(restart["message"]), 200) for restart in view.findings[-2:]),
            *([damaged(view)] if view.bad_lines else []),
        ],
        "controls": [{"verb": way.do, "title": way.title.capitalize(), "keeps": way.means} for way in asked],
        "resumable": view.state in ("stopped", "failed", "lost"),
        "empty": {"samples": NO_SAMPLES, "receipt": NO_RECEIPT},
        "chats": view.state == "finished" or (view.over and bool(view.committed)),
        "rollouts": bool(view.rollouts),
        "experts": bool(view.experts),
        "checkpoints": len(view.committed) if view.over else 0,
        "watch_for": (concern(view.method, view.series) or watch_for(view.method, view.series))
        if view.state in ("starting", "running")
        else "",
    }


def end(ending: End, run: RunFolder) -> dict[str, Any]:
    """The card of a run that is over: facts, and the ways on with their commands."""
    return {
        "facts": [[what, shown(words, 600)] for what, words in ending.facts],
        "ways": [
            {
                "do": way.do,
                "title": way.title.capitalize(),
                "means": shown(way.means, 300),
                "command": way.command,
                **(_forms(run) if way.do == "export" else {}),
            }
            for way in ending.ways
        ],
        "way_on": shown(ending.way_on, 300),
        "change": [
            [path, shown(proposals.shown(before), 120), shown(proposals.shown(after), 120)]
            for path, before, after in ending.change.sets
        ]
        if ending.change
        else [],
        "why": shown(ending.change.why, 300) if ending.change else "",
        "anew": ending.anew,
    }


def pruning(choice: Choice) -> dict[str, Any]:
    """Checkpoints that stay and that go: step, line, answers to the pinned prompts; and what removing frees."""

    def lines(checkpoints: Sequence[Kept]) -> list[list[Any]]:
        return [
            [
                each.step,
                f"{each.name}, {size(each.bytes)}",
                shown(each.summary(), 300),
                [[shown(asked["prompt"], 80), shown(asked["text"], 120)] for asked in each.answers[:SAMPLE_PROMPTS]],
            ]
            for each in checkpoints
        ]

    return {
        "keep": choice.keep,
        "stay": lines(choice.stay),
        "go": lines(choice.go),
        "act": f"Remove {choice.count()}, which frees {size(choice.bytes)}",
    }


def _forms(run: RunFolder) -> dict[str, Any]:
    """What a model can be taken along as, each with what it is for; number formats of a GGUF, and what others need."""
    needs = "" if makes_k_quants() else "Q4_K_M and other K-quants need llama.cpp: pip install llama-cpp-python"
    return {"forms": list(forms_of(run).items()), "quants": offered_quants(run), "needs": needs}


def _end(view: RunView) -> str:
    """Why it ended, and its best checkpoint."""
    return ". ".join(part for part in (view.cause, best_text(view)) if part)


def summary_of(view: RunView) -> str:
    """A run in three lines of text."""
    steps = f"step {view.step:,}" + (f" of {view.max_steps:,}" if view.max_steps else "")
    lines = [f"Run {visible(view.id)}: {view.state}, {visible(view.method)}, {steps}"]
    if (name := told_by(view.latest)[0]) in view.latest:
        lines.append(f"  {name} {view.latest[name]:.4g}")
    if view.silent_seconds is not None:
        lines.append("  " + silence.advice(visible(view.id), view.silent_seconds))
    if view.cause:
        lines.append(f"  {visible(view.cause)}")
    if best := best_text(view):
        lines.append(f"  {best}")
    lines.append(f"  In a terminal: workbench watch {visible(view.id)}")
    return "\n".join(lines)


def samples(view: RunView) -> list[dict[str, Any]]:
    """The newest answers to each prompt, the first answer kept below them for comparison."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for sample in view.samples:
        by_prompt.setdefault(sample["prompt"], []).append(sample)
    answered = []
    for prompt, samples in list(by_prompt.items())[:SAMPLE_PROMPTS]:
        newest = samples[-SAMPLE_ANSWERS:]
        if samples[0] not in newest:
            newest = [samples[0], *newest[1:]]
        answers = [[sample_time(sample["step"]), _shown_text(sample["completion"], 400)] for sample in reversed(newest)]
        answered.append({"prompt": shown(prompt, 300), "answers": answers})
    return answered


def _shown_text(text: str, limit: int) -> str:
    return shown(text, limit) if str(text).strip() else NO_WORDS


def experts(view: RunView) -> dict[str, Any]:
    """The picture of the load of a mixture's experts, and what it shows in words."""
    return {
        "picture": "\n".join(picture(view.experts, EXPERT_COLUMNS, layers=view.expert_layers)),
        "words": explained(view.experts, EXPERT_COLUMNS, layers=view.expert_layers),
    }


def rollouts(view: RunView) -> list[dict[str, Any]]:
    """The newest groups of completions, newest first; `offset` is the name by which the whole of one is asked for."""
    return [
        {
            "offset": entry["offset"],
            "step": entry["step"],
            "prompt": shown(entry["prompt"], 80),
            "count": entry["count"],
            "reward": entry["reward"],
            "spread": entry["reward_std"],
            "cut": entry["cut_off"],
            "replayed": entry["replayed_from"],
        }
        for entry in reversed(view.rollouts[-GROUPS:])
    ]


def group(stored: Mapping[str, Any]) -> dict[str, Any]:
    """One prompt with its completions: each with the reward of each function, their sum and its advantage."""
    completions = [each for each in stored["completions"] if isinstance(each, dict)]
    names = list(dict.fromkeys(name for each in completions for name in each.get("rewards") or ()))[:12]
    return {
        "step": stored.get("step"),
        "row": stored.get("row"),
        "replay": replay_text(step) if isinstance(step := stored.get("replayed_from"), int) else "",
        "prompt": shown(stored.get("prompt") or "", 2 * COMPLETION_CHARACTERS),
        "answer": None if stored.get("answer") is None else shown(stored["answer"], COMPLETION_CHARACTERS),
        "functions": [shown(name, 60) for name in names],
        "left": max(0, len(completions) - GROUP_COMPLETIONS),
        "completions": [_completion(each, names) for each in completions[:GROUP_COMPLETIONS]],
    }


def _completion(completion: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    rewards = completion.get("rewards") or {}
    return {
        "text": _shown_text(completion.get("text") or "", COMPLETION_CHARACTERS),
        "tokens": completion.get("tokens"),
        "rewards": [rewards.get(name) for name in names],
        "reward": completion.get("reward"),
        "advantage": completion.get("advantage"),
        "cut": bool(completion.get("cut_off")),
    }


def receipt_row(entry: dict[str, Any]) -> list[str]:
    return [
        shown(entry["feature"], 80),
        *("" if entry[key] is None else shown(plain(entry[key]), 120) for key in ("requested", "effective", "count")),
        shown(entry["detail"], 300),
    ]


def config(folder: RunFolder) -> str:
    try:
        return visible(redact(folder.config.read_text(encoding="utf-8")[:40_000]), lines=True)
    except (OSError, UnicodeDecodeError) as problem:
        return f"config.yaml cannot be read: {problem}"
