"""What the events of a run mean: `fold` is the only place that knows.

The terminal, the notebook, the commands and the tests all look at a `RunView`. The same events give the same view in
any batching. Unknown kinds, missing keys and wrong types change nothing and raise nothing. Points that a resumed run
takes back are cut from the curves and counted under `superseded`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any

from engine import figures
from engine.run import expert_load, time_left
from engine.run.series import Series

Event = dict[str, Any]
MAX_SERIES = 256
MAX_SAMPLES = 600
MAX_LIST = 1000
MAX_ROLLOUTS = 400
MAX_RANKS = 4096
MAX_PAUSES = 100
RANK_FIGURES = ("tokens_per_second", "data_seconds", "forward_seconds", "memory", "communication_seconds")
RANK_CURVES = 16
"""Ranks whose share of communication is a curve, `communication/rank0` and so on."""
SLOW = 0.1
"""The share of a step by which a rank must be late to be named."""
_PAUSES = time_left.SAVE, time_left.EVAL, time_left.PROMPTS
# Keys of a metrics event that are not curves.
_FRAME = frozenset({"v", "seq", "t", "rank", "segment", "kind", "step", "epoch", "cut"})


@dataclass
class RunView:
    """The state of a run as its events tell it. Plain data: `as_json` for machines, `copy` for keeping."""

    id: str = ""
    state: str = "starting"
    method: str = ""
    model: str = ""
    step: int = 0
    max_steps: int | None = None
    epoch: float | None = None
    epochs: float | None = None
    world_size: int = 1
    devices: list[Any] = field(default_factory=list)
    segment: int = -1
    resumed_from: int | None = None
    started: float | None = None
    ended: float | None = None
    updated: float | None = None
    cause: str = ""
    cause_kind: str = ""
    """One word of what ended it, for machines: `diverged`, `cuda_oom`, `disk full`, ..."""
    cause_lines: list[str] = field(default_factory=list)
    mends: list[dict[str, Any]] = field(default_factory=list)
    """Changes of the config that the worker knows to mend the cause, values by dotted paths, the best one first."""
    phase: str = ""
    phases: list[dict[str, Any]] = field(default_factory=list)
    """What this start has done so far, one after the other: `name`, and `t`, when it began."""
    progress: dict[str, Any] | None = None
    latest: dict[str, float] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    receipt: list[dict[str, Any]] = field(default_factory=list)
    _receipt_of: int = -1
    """The start that it is of."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    uploads: list[dict[str, Any]] = field(default_factory=list)
    """What became of each checkpoint that was sent to a hub: `step`, `state` (begun, retry, arrived, failed, passed, deleted),
    `repository`, `url`, `bytes`, `seconds`, and in `message` why it has not arrived."""
    best: dict[str, Any] | None = None
    """The step whose held-out rows were measured best so far: `step`, `metric` and `value`."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    controls: dict[str, dict[str, Any]] = field(default_factory=dict)
    gpu: list[dict[str, Any]] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    """Of a mixture of experts the newest load, a line of digits for each layer (`engine.run.expert_load`)."""
    expert_layers: list[int] = field(default_factory=list)
    """The layer of each of these lines; layers without experts have none."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """With several processes, the newest figures of each: `tokens_per_second`, `data_seconds`, `forward_seconds`, `memory`,
    `communication_seconds` (those of a step in which its computation stood still for others: exposed communication, waiting for
    a late rank included) and `communication_share` (of the step)."""
    diverged: list[dict[str, Any]] = field(default_factory=list)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    """Each time the worker died and was started anew: `step` and the words why (`message`)."""
    superseded: list[dict[str, int]] = field(default_factory=list)
    eta_seconds: float | None = None
    bad_lines: int = 0
    seq: int = -1
    step_seconds: float | None = None
    worked: float = 0.0
    """Seconds of the segments before this one; what lies between them is no work (`seconds`)."""
    segment_began: float | None = None
    pauses: list[int] = field(default_factory=list)
    """At multiples of these steps more than a step happens: evaluation, saving, sampling."""
    pause_steps: dict[str, int] = field(default_factory=dict)
    """The same by what happens then (`engine.run.time_left`); empty where an older run does not say it."""
    every: int = 1
    """Steps between two lines of numbers."""
    longest_gap: float = 0.0
    longest_pause: float = 0.0
    """The longest wait between two events of this segment: between steps, and at those steps."""
    silent_seconds: int | None = None
    """Since when no event came, where that is too long (`engine.run.silence`). Events cannot tell it: a watch does."""
    _last_step: tuple[int, float] | None = None
    _paces: int = 0
    _pause_costs: dict[str, float] = field(default_factory=dict)
    """What each of them takes, in seconds, once there was one."""
    _paused_at: dict[str, int] = field(default_factory=dict)
    """The step at which each was last."""
    _pauses_since: list[str] = field(default_factory=list)
    """Checkpoints and answers since the last line of a step."""
    _evaluated: float = 0.0
    """Seconds of evaluations since then."""

    @property
    def pausing(self) -> bool:
        """Whether more than a step may happen before the next line of numbers."""
        return self.step == self.max_steps or any(-self.step % pause < self.every for pause in self.pauses)

    @property
    def over(self) -> bool:
        return self.state in ("finished", "stopped", "failed", "lost")

    @property
    def seconds(self) -> float | None:
        """How long it has worked: the time of all its segments, without that in which it lay dead or stopped."""
        if self.segment_began is None or self.updated is None:
            return None
        return self.worked + max(0.0, self.updated - self.segment_began)

    def seconds_left(self, now: float | None = None) -> float | None:
        """`eta_seconds` less what has passed since the last event, as far as the next one is waited for; None where the end is
        not known, or another one than was planned, since somebody asked it to stop."""
        if self.state == "stopping":
            return None
        if self.eta_seconds is None or self.over or self.step_seconds is None or self.updated is None:
            return self.eta_seconds
        due = time_left.due(self.pause_steps, self._paused_at, self.step)
        wait = time_left.seconds(self.step_seconds, self.every, self._pause_costs, due)
        passed = (time.time() if now is None else now) - self.updated
        return max(0.0, self.eta_seconds - min(max(0.0, passed), wait))

    @property
    def committed(self) -> list[int]:
        """Steps of the checkpoints that are complete and still there, in order."""
        kept = (entry["step"] for entry in self.checkpoints if entry.get("state") == "committed")
        return sorted(step for step in kept if isinstance(step, int))

    @property
    def diverged_at(self) -> int | None:
        """The first step whose numbers were not finite, where there was one."""
        return next((entry["step"] for entry in self.diverged if entry["step"] is not None), None)

    @property
    def slowest(self) -> tuple[int, str, float] | None:
        """The rank that the others wait for: its number, at what (`data`, `forward pass`, or `own work` where it is neither),
        and how many seconds of a step it takes longer for it than half of the ranks. None where none stands out by a tenth of a
        step."""
        step = self.latest.get("step_seconds") or math.inf
        apart = [
            found
            for what, key in (("data", "data_seconds"), ("forward pass", "forward_seconds"))
            if (found := self._late(what, key, 1)) is not None and found[2] >= SLOW * step
        ]
        if apart:
            return max(apart, key=lambda found: found[2])
        # Who is late waits less than the others.
        found = self._late("own work", "communication_seconds", -1)
        return found if found is not None and found[2] >= SLOW * step else None

    def _late(self, what: str, key: str, sign: int) -> tuple[int, str, float] | None:
        spent = [sign * rank[key] for rank in self.ranks if isinstance(rank.get(key), int | float)]
        if len(spent) < 2 or len(spent) != len(self.ranks):
            return None
        return spent.index(max(spent)), what, max(spent) - sorted(spent)[(len(spent) - 1) // 2]

    @property
    def slowest_text(self) -> str:
        """The same in words; empty where none stands out."""
        if self.slowest is None:
            return ""
        rank, at, seconds = self.slowest
        return f"rank {rank} takes {figures.brief(seconds)} a step longer for its {at} than others"

    def copy(self) -> RunView:
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if name == "series":
                twin.series = {key: series.copy() for key, series in value.items()}
            elif isinstance(value, (list, dict)):
                setattr(twin, name, copy.deepcopy(value))
        return twin

    def as_json(self, *, points: int = 0) -> dict[str, Any]:
        """All of it as plain JSON; each curve as at most `points` triples (step, low, high), none by default."""
        values = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "series"}
        values["slowest"] = (
            None if self.slowest is None else dict(zip(("rank", "at", "seconds"), self.slowest, strict=True))
        )
        if points:
            values["series"] = {
                name: [list(triple) for triple in zip(*series.points(width=points), strict=True)]
                for name, series in self.series.items()
            }
        return values


def fold(view: RunView, events: Iterable[Event]) -> RunView:
    """The view after all these events. Changes and returns the given view."""
    meaning = _MEANING
    for event in events:
        seq, t, segment = event.get("seq"), event.get("t"), event.get("segment")
        if type(seq) is int and seq > view.seq:
            view.seq = seq
        if type(segment) is int and segment > view.segment:
            _begin_segment(view, segment)
        if type(t) is float or type(t) is int:
            if view.updated is not None and view.step and view.segment == segment:
                gap = t - view.updated
                if gap > view.longest_gap or (view.pauses and gap > view.longest_pause):
                    _note_gap(view, float(gap))
            view.updated = t
            if view.started is None:
                view.started = t
            if view.segment_began is None:
                view.segment_began = t
        act = meaning.get(event["kind"])
        if act is not None:
            act(view, event)
    return view


def _note_gap(view: RunView, gap: float) -> None:
    """The longest waits so far, by what may have happened in them."""
    if view.pausing:
        view.longest_pause = max(view.longest_pause, gap)
    else:
        view.longest_gap = max(view.longest_gap, gap)


def _begin_segment(view: RunView, segment: int) -> None:
    """A start or a resume: what the last end said no longer holds."""
    view.worked, view.segment_began = view.seconds or 0.0, None
    view.segment = segment
    view.state, view.ended, view.cause, view.cause_kind, view.cause_lines = "starting", None, "", "", []
    view.mends = []
    view.phase, view.progress, view.eta_seconds, view.step_seconds, view._last_step = "", None, None, None, None
    view.phases = []
    view._paces, view._paused_at, view._pauses_since, view._evaluated = 0, {}, [], 0.0
    view.gpu, view.ranks, view.controls = [], [], {}
    view.longest_gap = view.longest_pause = 0.0


def _started(view: RunView, event: Event) -> None:
    view.state = "running"
    view.method, view.model = _text(event, "method"), _text(event, "model")
    view.max_steps, view.epochs = _integer(event, "max_steps"), _number(event, "epochs")
    view.world_size = _integer(event, "world_size") or 1
    devices = event.get("devices")
    view.devices = devices if isinstance(devices, list) else []
    view.resumed_from = _integer(event, "resumed_from_step")
    pauses = event.get("pauses")
    view.pauses = (
        [pause for pause in pauses if type(pause) is int and pause > 0][:8] if isinstance(pauses, list) else []
    )
    named = event.get("pause_steps")
    view.pause_steps = (
        {kind: every for kind in _PAUSES if type(every := named.get(kind)) is int and every > 0}
        if isinstance(named, dict)
        else {}
    )
    view.every = max(1, _integer(event, "keep_every") or 1)
    view.progress = None
    if view.best is not None and view.segment > 0 and view.best["step"] > (view.resumed_from or 0):
        # What the run goes on from says which was the best until then.
        view.best = None
    if view.segment > 0 or view.resumed_from is not None:
        _supersede(view, view.resumed_from or 0)


def _supersede(view: RunView, step: int) -> None:
    """Points above the step that the run went back to belong to a way it no longer takes."""
    if view.step <= step and not any((s.last or (0, 0.0))[0] > step for s in view.series.values()):
        view.step = max(view.step, step)
        return
    count = max((series.cut_after(step) for series in view.series.values()), default=0)
    view.superseded.append({"segment": view.segment, "above": step, "to": view.step, "points": count})
    view.series = {name: series for name, series in view.series.items() if len(series)}
    view.latest = {name: last[1] for name, series in view.series.items() if (last := series.last)}
    view.samples = [sample for sample in view.samples if sample["step"] <= step]
    view.rollouts = [entry for entry in view.rollouts if entry["step"] <= step]
    view.diverged = [entry for entry in view.diverged if (entry["step"] or 0) <= step]
    view.step = step


def _metrics(view: RunView, event: Event) -> None:
    step = event.get("step")
    if type(step) is not int or step < 0:
        return
    series, latest = view.series, view.latest
    if view.segment > 0 and view._last_step is None and "loss" in event:
        # The first step of a run that goes on, maybe with other settings: what it no longer measures is not where it stands.
        for name in [name for name in latest if name not in event and not name.startswith("eval_")]:
            del latest[name]
    for name, value in event.items():
        if name in _FRAME:
            continue
        if type(value) is not float:
            if type(value) is not int:
                if value is None:
                    # It was not finite: the last one that was is not what the run stands at.
                    latest.pop(name, None)
                continue
            value = float(value)
        curve = series.get(name)
        if curve is None:
            if len(series) >= MAX_SERIES or not math.isfinite(value):
                continue
            curve = series[name] = Series()
        if math.isfinite(value) and curve.add(step, value):
            latest[name] = value
    epoch = event.get("epoch")
    if type(epoch) is float or type(epoch) is int:
        view.epoch = epoch
    if step > view.step:
        view.step = step
    if view.state == "starting":
        view.state = "running"
    _estimate_end(view, event, step)


def _estimate_end(view: RunView, event: Event, step: int) -> None:
    """The pace of the last steps, and what lay between them; `t` follows a monotonic clock inside a segment."""
    t = event.get("t")
    if type(t) is not float and type(t) is not int:
        return
    if "step_seconds" not in event and any(name.startswith("eval_") for name in event):
        took = _number(event, "eval_runtime")
        if took is not None and view._paused_at.get(time_left.EVAL) != step:
            # It says what it took: how the rest is divided need not be guessed.
            view._paused_at[time_left.EVAL] = step
            if view._last_step is not None:  # no phase in it, such as the compiler's
                view._pause_costs = time_left.learned(view._pause_costs, (time_left.EVAL,), took)
            view._evaluated += took
            _count_down(view)
        return
    last = view._last_step
    if last is None or step < last[0]:
        view._last_step, view._pauses_since, view._evaluated = (step, t), [], 0.0
    elif step > last[0]:
        if t > last[1]:
            gap, steps = t - last[1], step - last[0]
            own = _number(event, "step_seconds") if view.pause_steps else None
            pace = gap / steps if own is None else own
            # A plain mean of the first ones: what the first step costs once would else weigh on a hundred more.
            view._paces += 1
            weight = max(0.05, 1 / view._paces)
            view.step_seconds = (1 - weight) * (view.step_seconds or 0.0) + weight * pace
            if view._pauses_since and own is not None:
                between = max(0.0, gap - own * steps - view._evaluated)
                view._pause_costs = time_left.learned(view._pause_costs, view._pauses_since, between)
        view._last_step, view._pauses_since, view._evaluated = (step, t), [], 0.0
    _count_down(view)


def _note_pause(view: RunView, kind: str, step: int | None) -> None:
    """A checkpoint or answers, of which several events may tell."""
    if step is None or view._paused_at.get(kind) == step:
        return
    view._paused_at[kind] = step
    if len(view._pauses_since) < MAX_PAUSES:
        view._pauses_since.append(kind)
    _count_down(view)


def _count_down(view: RunView) -> None:
    """Seconds to go from where the run stands."""
    if not view.max_steps or view.step_seconds is None or view.over:
        return
    counts = time_left.to_come(view.pause_steps, view._paused_at, view.step, view.max_steps)
    view.eta_seconds = time_left.seconds(view.step_seconds, view.max_steps - view.step, view._pause_costs, counts)


def _phase(view: RunView, event: Event) -> None:
    view.phase, view.progress = _text(event, "name"), None
    view._last_step = None  # what waits for the compiler is no step's pace
    if view.updated is not None and (not view.phases or view.phases[-1]["name"] != view.phase):
        _append(view.phases, {"name": view.phase, "t": view.updated})


def _progress(view: RunView, event: Event) -> None:
    view.progress = {
        "what": _text(event, "what"),
        "done": _number(event, "done"),
        "total": _number(event, "total"),
        "unit": _text(event, "unit"),
    }


def _receipt(view: RunView, event: Event) -> None:
    """A later entry for a feature takes the place of the earlier one; a start's receipt that of those before it."""
    if view._receipt_of != view.segment:
        view._receipt_of = view.segment
        view.receipt.clear()
    for entry in _dicts(event, "entries"):
        feature = _text(entry, "feature")
        clean = {
            "feature": feature,
            "requested": entry.get("requested"),
            "effective": entry.get("effective"),
            "count": entry.get("count"),
            "detail": _text(entry, "detail"),
        }
        for place, known in enumerate(view.receipt):
            if known["feature"] == feature:
                view.receipt[place] = clean
                break
        else:
            _append(view.receipt, clean)


def _ranks(view: RunView, event: Event) -> None:
    columns = {name: column if isinstance(column := event.get(name), list) else [] for name in RANK_FIGURES}
    rows = (dict(zip(RANK_FIGURES, row, strict=True)) for row in zip_longest(*columns.values()))
    view.ranks = [{name: _number(row, name) for name in RANK_FIGURES} for row in islice(rows, MAX_RANKS)]
    seconds, step = _number(event, "step_seconds"), _integer(event, "step")
    for number, rank in enumerate(view.ranks):
        waited = rank["communication_seconds"]
        share = min(1.0, waited / seconds) if waited is not None and seconds else None
        rank["communication_share"] = share
        name = f"communication/rank{number}"
        if share is None or step is None or step < 0 or number >= RANK_CURVES or len(view.series) >= MAX_SERIES:
            continue
        view.series.setdefault(name, Series()).add(step, share)


def _experts(view: RunView, event: Event) -> None:
    view.experts = expert_load.checked(event.get("load"))
    view.expert_layers = expert_load.numbers(event.get("layers"), view.experts)


def _gpu(view: RunView, event: Event) -> None:
    view.gpu = _dicts(event, "devices")
    for device in view.gpu:
        index = device.get("index")
        for name in ("load", "memory_used", "power", "temperature"):
            value = _number(device, name)
            if value is not None and len(view.series) < MAX_SERIES:
                view.series.setdefault(f"gpu{index}/{name}", Series()).add(view.step, float(value))


def _sample(view: RunView, event: Event) -> None:
    _note_pause(view, time_left.PROMPTS, _integer(event, "step"))
    view.samples.append(
        {
            "step": _integer(event, "step") or 0,
            "index": _integer(event, "index") or 0,
            "prompt": _text(event, "prompt"),
            "completion": _text(event, "completion"),
        }
    )
    if len(view.samples) > MAX_SAMPLES:
        # The answers before training stay, for comparison; of the others the newest.
        first = min(sample["step"] for sample in view.samples)
        earliest = [sample for sample in view.samples if sample["step"] == first][: MAX_SAMPLES // 4]
        view.samples = earliest + [sample for sample in view.samples[-MAX_SAMPLES // 2 :] if sample["step"] != first]


def _rollout(view: RunView, event: Event) -> None:
    """A group of completions; its texts are read from the samples with `engine.run.rollouts.read_group`."""
    rewards = event.get("rewards")
    view.rollouts.append(
        {
            **{
                key: _integer(event, key) or 0
                for key in ("step", "group", "row", "count", "cut_off", "offset", "bytes")
            },
            **{key: _number(event, key) for key in ("reward", "reward_std")},
            "replayed_from": _integer(event, "replayed_from"),
            "prompt": _text(event, "prompt"),
            "rewards": {name: _number(rewards, name) for name in rewards} if isinstance(rewards, dict) else {},
        }
    )
    if len(view.rollouts) > MAX_ROLLOUTS:
        del view.rollouts[0]


def _checkpoint(view: RunView, event: Event) -> None:
    path = _text(event, "path")
    entry = {
        "step": _integer(event, "step"),
        "path": path,
        "bytes": _integer(event, "bytes"),
        "seconds": _number(event, "seconds"),
        "state": _text(event, "state"),
    }
    if entry["state"] in ("saving", "committed"):
        _note_pause(view, time_left.SAVE, _integer(event, "step"))
    for place, known in enumerate(view.checkpoints):
        if known["step"] == entry["step"]:
            # `deleted` tells no size; what was known of it stays.
            view.checkpoints[place] = {**known, **{key: value for key, value in entry.items() if value is not None}}
            return
    _append(view.checkpoints, entry)


def _upload(view: RunView, event: Event) -> None:
    entry = {
        "step": _integer(event, "step"),
        **{key: _text(event, key) for key in ("state", "repository", "url", "message", "what")},
        **{key: _number(event, key) for key in ("bytes", "seconds")},
    }
    for place, known in enumerate(view.uploads):
        if known["step"] == entry["step"]:
            # What it is, and how much, is told once; why it had not arrived holds until it has.
            kept = {key: value for key, value in entry.items() if value not in (None, "")}
            entry = {**known, **({"message": ""} if entry["state"] == "arrived" else {}), **kept}
            del view.uploads[place]  # what was told last stands last: a run that went back sends earlier steps again
            break
    _append(view.uploads, entry)


def _best(view: RunView, event: Event) -> None:
    step, value = _integer(event, "step"), _number(event, "value")
    if step is not None and value is not None:
        view.best = {"step": step, "metric": _text(event, "metric"), "value": value}


def _finding(view: RunView, event: Event) -> None:
    _append(view.findings, {key: _text(event, key) for key in ("path", "severity", "rule", "message")})


def _control(view: RunView, event: Event) -> None:
    name = _text(event, "id")
    if not name:
        return
    known = view.controls.pop(name, {})
    view.controls[name] = {
        "do": _text(event, "do") or known.get("do", ""),
        "status": _text(event, "status"),
        "message": _text(event, "message"),
    }
    while len(view.controls) > 50:
        del view.controls[next(iter(view.controls))]
    current = view.controls[name]
    if current["status"] == "accepted" and current["do"] != "checkpoint" and not view.over:
        view.state = "stopping"


def _diverged(view: RunView, event: Event) -> None:
    _append(view.diverged, {"step": _integer(event, "step"), "what": _text(event, "what")})


def _restart(view: RunView, event: Event) -> None:
    """It goes on: what the last end said is why there was a restart, and no end."""
    _append(view.restarts, {"step": view.step, "message": _text(event, "message")})
    view.state, view.ended, view.cause, view.cause_kind, view.cause_lines = "starting", None, "", "", []
    view.phase, view.phases = "Starting again", []


def _ended(view: RunView, event: Event) -> None:
    view.state = event["kind"]
    view.ended = view.updated
    view.eta_seconds, view.progress = None, None
    step = _integer(event, "step")
    if step is not None and step > view.step:
        view.step = step
    view.cause_kind = _text(event, "cause")
    if view.state == "failed":
        view.cause = _text(event, "message") or _text(event, "cause") or "unknown"
        view.mends = _dicts(event, "mends")[:8]
        lines = event.get("lines")
        view.cause_lines = [line for line in lines if isinstance(line, str)][:200] if isinstance(lines, list) else []
    elif view.state == "finished":
        view.cause = _text(event, "message")
    elif view.state == "stopped":
        by = _text(event, "by")
        view.cause = _text(event, "message") or (f"stopped by {by}" if by else "")


_MEANING: dict[str, Callable[[RunView, Event], None]] = {
    "started": _started,
    "metrics": _metrics,
    "phase": _phase,
    "progress": _progress,
    "receipt": _receipt,
    "gpu": _gpu,
    "ranks": _ranks,
    "experts": _experts,
    "sample": _sample,
    "rollout": _rollout,
    "checkpoint": _checkpoint,
    "upload": _upload,
    "best": _best,
    "finding": _finding,
    "control": _control,
    "diverged": _diverged,
    "restart": _restart,
    "finished": _ended,
    "stopped": _ended,
    "failed": _ended,
}


def _append(entries: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    entries.append(entry)
    if len(entries) > MAX_LIST:
        del entries[0]


def _text(event: Event, key: str) -> str:
    value = event.get(key)
    return value if isinstance(value, str) else "" if value is None or isinstance(value, (dict, list)) else str(value)


def _number(event: Event, key: str) -> float | None:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _integer(event: Event, key: str) -> int | None:
    value = event.get(key)
    return value if type(value) is int else None


def _dicts(event: Event, key: str) -> list[dict[str, Any]]:
    value = event.get(key)
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
