"""The one table of what a person can do: it feeds key bindings, the palette, the key line and the help screen.

An action's `id` is the name of a method `action_<id>` on the screen or the app. `screens` says where it works;
"everywhere" is the app itself. Keys are Textual's names; `shown` is how a person reads them. Letters act only while
nothing is being typed: a field in editing takes printable keys first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from textual.binding import Binding, BindingType


@dataclass(frozen=True)
class Action:
    """One thing to do: `line` puts it on the key line at the bottom as "key word", `quiet` keeps it out of the palette.

    `when` is what must hold of a run ("running", "finished", "ended early", "failed", "groups", "ranks", "experts", "plain", "room") or a chat for its key line to show it.
    """

    id: str
    keys: str
    label: str
    help: str
    screens: tuple[str, ...]
    shown: str = ""
    line: str = ""
    quiet: bool = False
    priority: bool = False
    when: str = ""
    call: str = ""
    """What is called where that is not the method `action_<id>`."""

    @property
    def name(self) -> str:
        """The keys as a person reads them."""
        return self.shown or self.keys.split(",")[0]


ACTIONS: tuple[Action, ...] = (
    # Everywhere
    Action(
        "help",
        "question_mark,f1",
        "help",
        "Keys of this screen, and what they do",
        ("everywhere",),
        "?",
        line="? help",
        call="show('help')",
    ),
    Action(
        "command_palette", "ctrl+p", "all", "Every action by name", ("everywhere",), "^p", quiet=True, line="^p all"
    ),
    Action("leave", "q", "back", "Go back; on the last screen, quit", ("everywhere",), "q"),
    Action("leave_all", "ctrl+q", "quit", "Quit", ("everywhere",), "^q", priority=True),
    Action("interrupt", "ctrl+c", "quit", "Quit, or leave editing", ("everywhere",), "^c", quiet=True),
    Action("suspend_process", "ctrl+z", "pause", "Put the app in the background of the shell", ("everywhere",), "^z"),
    Action("shade", "", "light or dark", "Change between light and dark", ("everywhere",)),
    Action("build", "", "build", "Build a config: the seven steps", ("everywhere",)),
    Action("runs", "r,f2", "runs", "List of runs", ("everywhere",), "r, F2", call="show('runs')"),
    Action("start", "f3", "start", "What goes on, what was open last, and ways to begin", ("everywhere",), "F3"),
    Action(
        "guide",
        "",
        "guided first run",
        "See a model learn a few rows by heart, and why",
        ("everywhere",),
        call="show('guide')",
    ),
    # Start
    Action("open", "enter", "open", "Open what is under the cursor", ("start",), line="enter open"),
    Action("new", "n", "new", "A new config, from what it shall learn", ("start",), line="n new"),
    Action("file", "o", "file", "Open a config file", ("start",), line="o file"),
    Action("runs", "", "runs", "", ("start",), "r", line="r runs", quiet=True),
    Action(
        "chat",
        "c,C",
        "chat",
        "Talk to the model of the run under the cursor",
        ("start",),
        "c",
        line="c chat",
        call="do('chat')",
    ),
    Action(
        "evaluate",
        "e,E",
        "measure",
        "Measure the run under the cursor on its held-out rows, beside the base; once more cancels",
        ("start",),
        "e",
        call="do('evaluate')",
    ),
    # Build
    Action(
        "edit",
        "",
        "edit",
        "Edit the setting in focus",
        ("build",),
        "enter",
        line="enter edit",
        quiet=True,
        call="draft('edit')",
    ),
    Action("to_form", "escape", "form", "", ("build",), quiet=True, call="steps('form')"),
    Action(
        "turn(-1)",
        "left_square_bracket,H",
        "previous step",
        "Go to the previous step",
        ("build",),
        "[",
        call="steps('back')",
    ),
    Action(
        "turn(1)",
        "right_square_bracket,L",
        "next step",
        "Go to the next step",
        ("build",),
        "]",
        line="[ ] step",
        call="steps('on')",
    ),
    Action("preview", "p", "preview", "See the tokens that will be trained", ("build",), line="p preview"),
    Action(
        "columns",
        "m",
        "columns",
        "Name the column of each part, beside three rows",
        ("build", "preview"),
    ),
    Action("count", "c", "count", "Stop counting the rows, or count them", ("build",)),
    Action(
        "fix",
        "f",
        "fix",
        "Apply the proposed fix of the finding in view",
        ("build",),
        line="f fix",
        call="steps('fix')",
    ),
    Action(
        "undo", "u,ctrl+u", "undo", "Take back the last change", ("build",), "u", line="u undo", call="draft('undo')"
    ),
    Action("redo", "U,ctrl+r", "redo", "Do again what was undone", ("build",), "U", call="draft('redo')"),
    Action(
        "find",
        "slash",
        "find",
        "Find a setting or a term by words of its help",
        ("build",),
        "/",
        line="/ find",
        call="steps('find')",
    ),
    Action(
        "findings",
        "exclamation_mark",
        "findings",
        "List everything found; Enter jumps there",
        ("build",),
        "!",
        call="steps('findings')",
    ),
    Action(
        "levels",
        "a",
        "more settings",
        "Show basic, then advanced, then expert settings",
        ("build",),
        "a",
        call="steps('more')",
    ),
    Action(
        "default",
        "backspace,delete",
        "default",
        "Put the setting in focus back to its default",
        ("build",),
        "del",
        call="draft('default')",
    ),
    Action("fold", "z", "fold", "Fold or unfold the right column", ("build",), "z", call="steps('fold')"),
    Action("yaml", "y", "edit YAML", "Edit the config as YAML in $EDITOR", ("build",), "y", call="draft('yaml')"),
    Action("write", "w,ctrl+s", "save", "Save the config to a file", ("build",), "w, ^s", call="draft('write')"),
    Action("launch", "", "start the run", "Go to the last step and start the run", ("build",)),
    Action("step('goal')", "1", "go to Goal", "Go to a step", ("build",), "1 to 7", call="steps('goal')"),
    Action("step('model')", "2", "go to Model", "", ("build",), call="steps('model')"),
    Action("step('data')", "3", "go to Data", "", ("build",), call="steps('data')"),
    Action("step('method')", "4", "go to Method", "", ("build",), call="steps('method')"),
    Action("step('memory')", "5", "go to Memory and speed", "", ("build",), call="steps('memory')"),
    Action("step('review')", "6", "go to Review", "", ("build",), call="steps('review')"),
    Action("step('launch')", "7", "go to Launch", "", ("build",), call="steps('launch')"),
    # Columns of a source
    Action("part(1)", "down,j", "next part", "The next part of a row", ("columns",), "↓"),
    Action("part(-1)", "up,k", "part before", "The part before", ("columns",), "↑"),
    Action("take(1)", "right,l", "next column", "The next column for it", ("columns",), "←→", line="←→ column"),
    Action("take(-1)", "left,h", "column before", "The column before", ("columns",), "←"),
    Action(
        "none",
        "backspace,delete",
        "detect",
        "The column that the format takes if none is named",
        ("columns",),
        "del",
        line="del detect",
    ),
    Action("keep", "enter", "keep", "Keep the choice in the config", ("columns",), "enter", line="enter keep"),
    Action("cancel", "escape", "back", "Go back without a change", ("columns",), "esc", line="esc back"),
    # A chat template: a text is written in all the time, so keys are with ctrl
    Action("row(1)", "ctrl+n", "next row", "The next row", ("template",), "^n", line="^n next"),
    Action("row(-1)", "ctrl+b", "previous row", "The row before", ("template",), "^b"),
    Action("numbers", "ctrl+t", "token ids", "Ids under the tokens", ("template",), "^t", line="^t ids"),
    Action("save", "ctrl+s", "save", "Save it to a file that the config names", ("template",), "^s", line="^s save"),
    Action(
        "other", "tab", "scroll", "Keys to the row, or back to the template", ("template",), "tab", line="tab scroll"
    ),
    Action("cancel", "escape", "back", "Go back", ("template",), "esc", line="esc back"),
    # A config of another tool
    Action("take_over", "t", "take over", "Take it over as a new config", ("ledger",), line="t take-over"),
    # The guided first run
    Action(
        "on",
        "enter,right",
        "next",
        "The next page; starts the rehearsal on its page",
        ("guide",),
        "enter",
        line="enter next",
    ),
    Action("back", "left", "back", "The page before", ("guide",), "←", line="← back"),
    Action("rows", "r", "other rows", "Take other rows", ("guide",), line="r other-rows"),
    Action("terms", "t", "terms", "The words of this page in plain sentences", ("guide",), line="t terms"),
    Action(
        "chat",
        "c",
        "chat",
        "Talk to the model that has learned these rows, beside the one that knew nothing",
        ("guide",),
    ),
    Action("open", "o", "open run", "Watch the rehearsal with all its curves", ("guide",), line="o open-run"),
    # Monitor: what is wanted most comes first, since a narrow key line drops what comes last
    Action(
        "stop",
        "s",
        "stop",
        "Ways to stop, each with what it keeps",
        ("monitor",),
        line="s stop",
        when="running",
        call="do('stop')",
    ),
    Action(
        "resume",
        "R",
        "resume",
        "Go on from the newest whole checkpoint",
        ("monitor", "runs"),
        line="R resume",
        when="ended early",
        call="do('resume')",
    ),
    Action("tab('curves')", "1", "curves", "Curves and newest numbers", ("monitor",), "1", line="1 curves"),
    Action("tab('samples')", "2", "samples", "Answers to the pinned prompts", ("monitor",), "2", line="2 samples"),
    Action("tab('log')", "3", "log", "What the worker printed", ("monitor",), "3", line="3 log"),
    Action("tab('receipt')", "4", "receipt", "What was really done", ("monitor",), "4", line="4 receipt", when="room"),
    Action("tab('config')", "5", "config", "The config of this run", ("monitor",), "5", line="5 config", when="plain"),
    Action(
        "tab('end')",
        "6",
        "how it ended",
        "What the run leaves, or why it failed; and the ways on",
        ("monitor",),
        "6",
        line="6 end",
        when="card",
    ),
    Action(
        "tab('groups')",
        "7",
        "groups of answers",
        "Answers to one prompt, with rewards",
        ("monitor",),
        "7",
        line="7 groups",
        when="groups",
    ),
    Action(
        "tab('ranks')",
        "8",
        "ranks",
        "What each process of a run on several devices does, and which is the slowest",
        ("monitor",),
        "8",
        line="8 ranks",
        when="ranks",
    ),
    Action(
        "tab('experts')",
        "9",
        "experts",
        "How many tokens each expert of a mixture takes, a line a layer",
        ("monitor",),
        "9",
        line="9 experts",
        when="experts",
    ),
    Action(
        "rank(1)", "right_square_bracket", "log of the next rank", "What the next process printed", ("monitor",), "]"
    ),
    Action(
        "rank(-1)",
        "left_square_bracket",
        "log of the rank before",
        "What the process before it printed",
        ("monitor",),
        "[",
    ),
    Action("group(-1)", "N", "older group", "The group of answers before", ("monitor",), "N"),
    Action("group(1)", "n", "newer group", "The next group; the newest is followed", ("monitor",), "n"),
    Action(
        "checkpoint",
        "c",
        "checkpoint",
        "Save a checkpoint and go on",
        ("monitor",),
        line="c checkpoint",
        when="running",
        call="do('checkpoint')",
    ),
    Action(
        "stack",
        "K",
        "stack",
        "Show where the worker is at this moment, also when it hangs",
        ("monitor",),
        "K",
        call="do('stack')",
    ),
    Action("next_curve", "v", "next curve", "Show the next curve in the large chart", ("monitor",), line="v curve"),
    Action("next_curve(-1)", "V", "previous curve", "Show the previous curve", ("monitor",)),
    Action("chart('back')", "left", "cursor back", "A cursor on the curve, a point back", ("monitor",), "left"),
    Action("chart('on')", "right", "cursor on", "A point on; Tab goes to the other charts", ("monitor",), "right"),
    Action("chart('log')", "L", "log scale", "Log scale, or not, with every value on the axis", ("monitor",)),
    Action("chart('smooth')", "m", "smooth", "Running mean, running median, or as it is", ("monitor",)),
    Action(
        "chart('in')", "plus,equals_sign", "zoom in", "Zoom to the cursor, or to the newest steps", ("monitor",), "+"
    ),
    Action("chart('out')", "minus", "zoom out", "Zoom out", ("monitor",), "-"),
    Action(
        "chart('whole')", "0", "whole run", "Show the whole curve again, the axis chosen by its values", ("monitor",)
    ),
    Action("batch", "enter", "batch", "The rows behind the point under the cursor", ("monitor",), "enter"),
    Action("find", "slash", "find", "Find words in the log or the config", ("monitor",), "/"),
    Action("back", "escape", "back", "Take the cursor away; then go back", ("monitor",), "esc", quiet=True),
    Action(
        "chat",
        "C",
        "chat",
        "Talk to the model, beside its base",
        ("monitor", "runs"),
        line="C chat",
        when="finished",
        call="do('chat')",
    ),
    Action(
        "evaluate",
        "E",
        "measure",
        "Measure the newest checkpoint on the held-out rows, beside the base; once more cancels",
        ("monitor", "runs"),
        when="finished",
        call="do('evaluate')",
    ),
    Action(
        "tasks",
        "M",
        "score",
        "Score it by a task of lm-evaluation-harness, a YAML file, beside the base; once more cancels",
        ("monitor", "runs"),
        when="finished",
        call="do('tasks')",
    ),
    Action(
        "export",
        "X",
        "export",
        "Take the model along: a folder, an adapter, GGUF",
        ("monitor",),
        line="X export",
        when="finished",
        call="do('export')",
    ),
    Action(
        "longer",
        "T",
        "train longer",
        "Go on with a finished run, or begin a new one from its config",
        ("monitor",),
        call="do('longer')",
    ),
    Action(
        "prune",
        "P",
        "remove checkpoints",
        "Which checkpoints stay and why, and which may go to free the disk; asks before it removes them",
        ("monitor", "runs"),
        call="do('prune')",
    ),
    Action("beside", "B", "compare", "Lay another run beside this one", ("monitor",), call="do('compare')"),
    # Chat: a line is written in all the time, so keys are with ctrl
    Action(
        "halt", "escape", "stop", "Stop the answer; else go back", ("chat",), "esc", line="esc stop", when="answering"
    ),
    Action(
        "again", "ctrl+r", "again", "Answer the newest text once more", ("chat",), "^r", line="^r again", when="text"
    ),
    Action(
        "template",
        "ctrl+t",
        "rendered prompt",
        "The exact text that the model reads, and its tokens",
        ("chat",),
        "^t",
        line="^t template",
        when="text",
    ),
    Action(
        "settings",
        "ctrl+o",
        "settings",
        "Temperature, system prompt and others",
        ("chat",),
        "^o",
        line="^o settings",
        when="text",
    ),
    Action(
        "save",
        "ctrl+s",
        "save rows",
        "Save the conversation as rows to train on",
        ("chat",),
        "^s",
        line="^s save",
        when="text",
    ),
    Action("renew", "ctrl+n", "new", "Begin a new conversation", ("chat",), "^n", line="^n new"),
    Action(
        "scroll", "tab", "scroll", "Keys to what was said, or back to the line", ("chat",), "tab", line="tab scroll"
    ),
    # Runs
    Action("open", "enter", "open", "Watch the run under the cursor", ("runs",), line="enter open"),
    Action("mark", "space", "mark", "Mark the run for comparing, or not", ("runs",), line="space mark"),
    Action(
        "compare",
        "c",
        "compare",
        "Curves, settings and answers of the marked runs together",
        ("runs",),
        line="c compare",
        when="marked",
    ),
    Action("delete", "D", "delete", "Delete the run, after saying what would be lost", ("runs",), line="D delete"),
    Action("filter", "slash", "filter", "Only runs with these words", ("runs",), "/", line="/ filter"),
    Action("place(-1)", "less_than_sign", "earlier", "A queued run: a place earlier in the queue", ("runs",), "<"),
    Action("place(1)", "greater_than_sign", "later", "A queued run: a place later in the queue", ("runs",), ">"),
    Action("sort", "o", "order", "Order by time, state, name or loss", ("runs",), line="o order"),
    # Compare
    Action(
        "next_curve",
        "v",
        "next curve",
        "Lay the next curve of all of them over each other",
        ("compare",),
        line="v curve",
    ),
    Action("next_curve(-1)", "V", "previous curve", "The previous curve", ("compare",)),
    Action("settings", "tab", "settings", "To what differs below, or to the chart", ("compare",), line="tab settings"),
    Action("back", "escape", "back", "Take the cursor away; then go back", ("compare",), "esc", line="esc back"),
    # Preview
    Action("row(1)", "n", "next row", "The next row", ("preview",), line="n next"),
    Action("row(-1)", "N", "previous row", "The previous row", ("preview",)),
    Action("random", "r", "random row", "A row at random", ("preview",), line="r random"),
    Action("worst", "w", "worst rows", "The longest, the untrained, the most cut row", ("preview",), line="w worst"),
    Action(
        "ids", "number_sign", "token ids", "Ids under the tokens", ("preview",), "#", line="# ids", call="turn('ids')"
    ),
    Action("packs", "b", "packs", "Packs, or single rows", ("preview",), line="b packs"),
    Action(
        "pictures",
        "i",
        "images",
        "Images as pictures, or their words alone",
        ("preview",),
        line="i images",
        call="turn('pictures')",
    ),
    Action(
        "raw",
        "v",
        "raw row",
        "The row as it stands in its file, or its tokens",
        ("preview",),
        line="v raw",
        call="turn('raw_first')",
    ),
    Action(
        "template",
        "t",
        "template",
        "The chat template, beside this row as it writes it",
        ("preview",),
        line="t template",
    ),
    Action("search", "slash", "search", "The next row with a text", ("preview",), "/", line="/ search"),
    Action("cancel", "escape", "cancel", "Cancel the question, or go back", ("preview",), "esc", quiet=True),
)


def actions(*screens: str) -> tuple[Action, ...]:
    """The actions of these screens, in the table's order."""
    return tuple(action for action in ACTIONS if set(action.screens) & set(screens))


def bindings(screen: str) -> list[BindingType]:
    """The key bindings of a screen; the ids let a person's keymap change them."""
    return [
        Binding(
            action.keys,
            action.call or action.id,
            action.label,
            show=bool(action.line),
            priority=action.priority,
            id=action.id,
        )
        for action in actions(screen)
        if action.keys
    ]


def key_line(screen: str, *holds: str) -> list[tuple[str, str]]:
    """What the key line shows: (key, word), the screen's own first; of a run of which this holds only what can be done."""
    shown = [action for action in (*actions(screen), *actions("everywhere")) if action.line]
    lines = [action.line for action in shown if not holds or action.when in ("", *holds)]
    return [(line.rpartition(" ")[0], line.rpartition(" ")[2]) for line in lines]


def keymap(file: Path) -> tuple[Mapping[str, str], str]:
    """A person's own keys, `{"undo": "ctrl+y"}` by action, and what is wrong with the file in one sentence, if anything."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError) as problem:
        return {}, f"{file}: cannot be read as keys: {problem}. The usual keys stand."
    known = {action.id for action in ACTIONS if action.keys}
    if not isinstance(document, dict):
        return {}, f'{file}: must be settings of the form {{"undo": "ctrl+y"}}; the usual keys stand.'
    odd = [str(name) for name, keys in document.items() if name not in known or not isinstance(keys, str)]
    mine = {name: keys for name, keys in document.items() if name in known and isinstance(keys, str)}
    return mine, f"{file}: knows no action {', '.join(odd[:3])}." if odd else ""
