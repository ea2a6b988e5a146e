"""One prompt with the answers that the model gave to it: reward of each function, advantage, and what was cut off.

The newest group of new answers is followed until a person goes to another one. What stands above or below its group is told by
a sign and a number, never by colour alone. Wide terminals show answers side by side; narrow ones one below the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from engine.errors import WorkbenchError, visible
from engine.figures import count, number
from engine.run.rollouts import read_group
from engine.session.run_messages import NO_WORDS, replay_text
from workbench.panels.drawn import Scrolled
from workbench.panels.glyphs import ascii_only
from workbench.panels.paint import Line, clean, cut, paragraph, side_by_side

if TYPE_CHECKING:
    from engine.run.store import RunFolder
    from engine.run.view import RunView

COLUMN = 56
"""Cells that an answer wants before another one is put beside it."""
GAP = 3


class Groups(Scrolled):
    """The group in view, whole; `folder` is set by the screen that shows it."""

    view: RunView | None = None
    folder: RunFolder | None = None
    chosen: int | None = None
    """Its place in the file; nothing follows the newest one of new answers."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._read: tuple[int, dict[str, Any] | None, str] | None = None

    def go(self, by: int) -> str:
        """So many groups newer, or older; what hinders it, in words."""
        entries = self.view.rollouts if self.view else []
        if not entries:
            return "There is no group yet."
        places = [entry["offset"] for entry in entries]
        at = places.index(self.chosen) if self.chosen in places else _newest(entries)
        wanted = at + by
        if not 0 <= wanted < len(places):
            return "This is the newest group." if by > 0 else "This is the oldest group that is kept."
        self.chosen = places[wanted] if wanted != _newest(entries) else None
        self.to_top()
        self.redraw()
        return ""

    def lines(self, width: int) -> list[Line]:
        """Which group, the prompt, the reference, the answers."""
        entries = self.view.rollouts if self.view else []
        if not entries:
            return paragraph(self._nothing(), width, "faint")
        places = [entry["offset"] for entry in entries]
        at = places.index(self.chosen) if self.chosen in places else _newest(entries)
        entry = entries[at]
        drawn: list[Line] = [[(cut(_place(entry, at, len(entries)), width), "accent")]]
        drawn.append([(cut(_worth(entry), width), "dim")])
        if entry["replayed_from"] is not None:
            drawn += paragraph(replay_text(entry["replayed_from"]), width, "warn")
        group, problem = self._read_group(entry)
        drawn += paragraph(_text((group or entry).get("prompt")), width, "value")
        if group is None:
            return [*drawn, [], *paragraph(problem, width, "warn")]
        if group.get("answer") is not None:
            drawn += paragraph(f"reference: {_text(group['answer'])}", width, "dim")
        across = max(1, (width + GAP) // (COLUMN + GAP))
        room = (width - GAP * (across - 1)) // across
        blocks = [_answer(completion, room) for completion in group["completions"] if isinstance(completion, dict)]
        for start in range(0, len(blocks), across):
            drawn += [[], *side_by_side(blocks[start : start + across], room, (" " * GAP, ""))]
        return drawn

    def _read_group(self, entry: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """The group as it lies in the file, read once, or why it is not there."""
        if self._read is None or self._read[0] != entry["offset"]:
            problem = "The answers of this group are not in the run's folder any more."
            try:
                group = read_group(self.folder, entry) if self.folder else None
            except WorkbenchError as error:
                group, problem = None, error.message
            self._read = (entry["offset"], group, problem)
        return self._read[1], self._read[2]

    def _nothing(self) -> str:
        from engine.config.method import METHODS

        method = self.view.method if self.view else ""
        makers = [kind.upper() for kind, section in METHODS.items() if section.rows == "prompts"]
        if method in METHODS and METHODS[method].rows == "prompts":
            return "No group yet: the first comes with the first answers that the model gives to the prompts."
        return (
            f"{clean(method).upper()} learns from answers that are in the data, so there are no groups of the model's "
            f"own answers to show. Methods that make them: {', '.join(makers)}."
        )


def _newest(entries: list[dict[str, Any]]) -> int:
    """The place of the last group that is no replay: what the model answers now."""
    return next(
        (place for place in reversed(range(len(entries))) if entries[place]["replayed_from"] is None), len(entries) - 1
    )


def _place(entry: dict[str, Any], at: int, total: int) -> str:
    answers = "answer" if entry["count"] == 1 else "answers"
    where = f"step {count(entry['step'])}   row {count(entry['row'])}   {count(entry['count'])} {answers}"
    return f"group {count(at + 1)} of {count(total)}   {where}   N older, n newer"


def _worth(entry: dict[str, Any]) -> str:
    spread = f" ± {number(entry['reward_std'], 2)}" if entry["reward_std"] is not None else ""
    same = "   all the same, so nothing is learnt from them" if entry["reward_std"] == 0 else ""
    cut_off = f"   {count(entry['cut_off'])} of {count(entry['count'])} cut off" if entry["cut_off"] else ""
    return f"reward {number(entry['reward'])}{spread}{same}{cut_off}"


def _answer(completion: dict[str, Any], width: int) -> list[Line]:
    """Advantage, rewards and length in one line or more, then the text."""
    advantage = completion.get("advantage")
    value = advantage if isinstance(advantage, int | float) else 0
    up, down = ("^", "v") if ascii_only() else ("▲", "▼")
    sign, style = (up, "good") if value > 0 else (down, "bad") if value < 0 else ("=", "dim")
    rewards = completion.get("rewards")
    rewards = rewards if isinstance(rewards, dict) else {}
    facts = [f"{clean(name)} {_figure(reward)}" for name, reward in rewards.items()]
    if len(facts) != 1:
        facts.append(f"reward {_figure(completion.get('reward'))}")
    facts.append(f"{count(completion['tokens'])} tokens" if isinstance(completion.get("tokens"), int) else "")
    facts.append("cut off" if completion.get("cut_off") else "")
    facts = list(filter(None, facts))
    words = "   ".join(facts)
    head = f"{sign} advantage {value:+.2f}"
    drawn: list[Line]
    if cell_len(head) + 3 + cell_len(words) <= width:
        drawn = [[(head, style), (f"   {words}", "dim")]]
    else:
        drawn = [[(head, style)], *paragraph(", ".join(facts), width, "dim", indent="  ")]
    text = _text(completion.get("text"))
    return [*drawn, *(paragraph(text, width, "value", indent="  ") if text.strip() else [[(f"  {NO_WORDS}", "faint")]])]


def _figure(value: object) -> str:
    return number(value if isinstance(value, int | float) else None)


def _text(value: object) -> str:
    """Text of any origin with its own lines, safe to draw."""
    return visible(str(value if value is not None else ""), lines=True)
