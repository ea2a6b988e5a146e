"""The few exceptions that users see, and the words and safety that every message shares.

A message is one sentence that names the place, the value and the way out. `redact` hides the home directory and
secrets (`without_secrets` the secrets alone); `visible` makes control, bidi and invisible characters harmless and visible. Standard library only.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, Self, TextIO
from urllib.parse import urlsplit


class WorkbenchError(Exception):
    """One sentence for the person, an optional hint below it, and the exit code of the command. Neither shows a secret or the home
    directory."""

    exit_code = 1
    cause = "error"
    """The word for machines where it ends a run."""
    mends: tuple[Mapping[str, Any], ...] = ()
    """Changes of a config after which this would not come again, values by dotted paths, the best one first."""

    def __init__(self, message: str, hint: str = "", *, exit_code: int | None = None) -> None:
        self.message, self.hint = redact(message), redact(hint)
        super().__init__(self.message)
        if exit_code is not None:
            self.exit_code = exit_code

    def mended_by(self, *changes: Mapping[str, Any]) -> Self:
        """This error, with changes of a config after which it would not come again."""
        self.mends = changes
        return self

    @property
    def full_message(self) -> str:
        """Message and hint one after the other, where there is one line for both."""
        stop = "." if self.hint and not self.message.endswith((".", "?", ":")) else ""
        return f"{self.message}{stop} {self.hint}".strip()

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows below a cell: the sentence and the way out, where IPython would show lines of this code."""
        return [f"{type(self).__name__}: {visible(self.full_message, lines=True)}"]


class UsageError(WorkbenchError):
    """The call itself is off: a wrong argument, an unfit terminal."""

    exit_code = 2


class ConfigUnreadable(WorkbenchError):
    """The config file cannot be read as a config at all."""

    exit_code = 2


class DataError(WorkbenchError):
    """A data source cannot be used; names the file and, where known, line and column (both from 1)."""

    def __init__(
        self, message: str, hint: str = "", *, path: str = "", line: int | None = None, column: int | None = None
    ) -> None:
        place = ":".join(str(part) for part in (path, line, column) if part not in ("", None))
        super().__init__(f"{place}: {message}" if place else message, hint)
        self.path, self.line, self.column = path, line, column


class ModelError(WorkbenchError):
    """A model or tokenizer cannot be used."""


class Diverged(WorkbenchError):
    """Training ended because numbers of `step` were not finite: its loss, its gradient norm or the weights; `of` says whose."""

    def __init__(self, step: int, what: str, hint: str = "", *, of: str = "") -> None:
        were = "were" if what.endswith("s") and not what.endswith("ss") else "was"
        super().__init__(f"Training diverged at step {step}: {what}{of} {were} not finite (NaN or infinite).", hint)
        self.step = step


class RunNotFound(WorkbenchError):
    """No run has this name: the call names something that is not there."""

    exit_code = 2


class RunBusy(WorkbenchError):
    """The run's lock is held by a living process."""


class Cancelled(WorkbenchError):
    """The person cancelled a long task."""

    exit_code = 130


_SECRET = re.compile(
    # by their own beginnings: Hugging Face, OpenAI and others, GitHub, GitLab, Slack, AWS, Google, PyPI, W&B, JWT
    r"hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[opusr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}|xox[a-z]-[A-Za-z0-9-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|AIza[A-Za-z0-9_-]{30,}|pypi-[A-Za-z0-9_-]{16,}|wandb_v1_[A-Za-z0-9_-]{16,}|local-[0-9a-f]{40}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"
    # addresses that are secrets: webhooks of Slack and Discord
    r"|(?<=hooks\.slack\.com/services/)[A-Za-z0-9_/-]{8,}|(?<=/api/webhooks/)[0-9]+/[A-Za-z0-9_-]{16,}"
    # by their place: in addresses, headers and after a name
    r"|(?<=://)(?:[^/\s'\"]*:[^/\s'\"]+|[^/\s:@'\"]{16,})(?=@)|(?i:(?<=bearer )|(?<=basic ))[A-Za-z0-9._~+/=-]{8,}"
    r"|(?i:(?<=token=)|(?<=api_key=)|(?<=password=)|(?<=secret=))[^\s&'\"]{4,}"
)
_NAMED = re.compile(
    r"(?i)((?:api_?key|secret(?:_access)?_?key|secret|password|passwd|(?:hub|hf|auth|access|session)_token)"
    r"['\"]?\s*[=:]\s*['\"]?)(?!nothing\b|none\b|null\b|\[hidden)[^\s&'\",}]{8,}"
)


def without_secrets(text: str) -> str:
    """The text with `[hidden]` in the place of tokens, keys, passwords and credentials in addresses."""
    return _sentence_without(text) if len(text) <= _SENTENCE else _without(text)


def _without(text: str) -> str:
    return _NAMED.sub(r"\1[hidden]", _SECRET.sub("[hidden]", text))


_SENTENCE = 500
_sentence_without = lru_cache(maxsize=2048)(_without)
"""Kept, because a form says the same sentences again with each key press, and to look for secrets in them took half of that."""


def host_of(address: object) -> str:
    """The host of an http or https address, which is all of it that may be shown; empty for what is no such address."""
    if not isinstance(address, str) or visible(address) != address or re.search(r"\s", address):
        return ""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
        port = parts.port
    except ValueError:
        return ""
    if parts.scheme.lower() not in ("http", "https") or not host:
        return ""
    return f"{host}:{port}" if port else host


def redact(text: str) -> str:
    """The text without secrets, and with the home directory written as `~`."""
    text = without_secrets(text)
    home = os.path.expanduser("~")
    if len(home) > 1 and home != os.devnull:  # which an account without one has for a home
        text = re.sub(re.escape(home) + r"(?=$|[/\s:'\",)])", "~", text)
    return text


def as_argument(path: str | os.PathLike[str]) -> str:
    """A path as a command that is shown takes it: quoted for a shell, with the home directory as `~`."""
    text, home = os.fspath(path), os.path.join(os.path.expanduser("~"), "")
    return f"~/{shlex.quote(text[len(home) :])}" if len(home) > 1 and text.startswith(home) else shlex.quote(text)


class Redacting:
    """A text stream that writes everything without secrets: the log of a process in which libraries print too."""

    def __init__(self, stream: TextIO, also: TextIO | None = None) -> None:
        self._stream, self._also = stream, also

    def write(self, text: str) -> int:
        shown = without_secrets(text)
        self._stream.write(shown)
        if self._also is not None:
            self._also.write(shown)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CONTROL_AND_LINES = re.compile("[\x00-\x1f\x7f-\x9f]")


@cache
def _hidden() -> re.Pattern[str]:
    """Zero-width, bidi, tag and separator characters: they can hide or reorder what a person reads."""
    return re.compile(
        "[\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
        "\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff\ud800-\udfff]"
    )


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return f"\\x{code:02x}"


def visible(text: str, *, lines: bool = False) -> str:
    """`text` safe for a terminal: control characters as pictures (`␛`), hidden ones as escapes (`\\u202e`).

    With `lines` the newline and the tab stay as they are.
    """
    if text.isascii():
        # most of what is shown is plain, and a command that shows nothing else need not build the long pattern
        return text if text.isprintable() else (_CONTROL if lines else _CONTROL_AND_LINES).sub(_picture, text)
    text = (_CONTROL if lines else _CONTROL_AND_LINES).sub(_picture, text)
    return _hidden().sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def first_line(problem: BaseException) -> str:
    """What the error of another library says first; those behind it are its traces and advice."""
    return str(problem).strip().partition("\n")[0]


def full_text(problem: BaseException) -> str:
    """All that an error says: one of ours with its way out."""
    return problem.full_message if isinstance(problem, WorkbenchError) else str(problem)


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that `word` was probably meant to be, or nothing; `cutoff` is how alike they must be, up to 1."""
    return _nearest(word[:100], tuple(known), cutoff)


@lru_cache(maxsize=1024)
def _nearest(word: str, known: tuple[str, ...], cutoff: float) -> str | None:
    """Kept, because a form asks the same about every bad value again with each key press."""
    import difflib  # only a wrong name needs it

    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return close[0] if close else None
