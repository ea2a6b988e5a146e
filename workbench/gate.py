"""What may pass between the app and the terminal: no control character out, no bad byte in.

Owns the last gate for text on its way to the screen and the tolerant reading of keys. Text from outside is made visible
where it enters (`engine.errors.visible`); this gate is for what slipped through, whatever widget drew it. One decision
worth knowing: the key reader is the driver's own function under another decoder, in a subclass, so that the library's
module stays untouched.
"""

from __future__ import annotations

import codecs
import re
import types
from collections.abc import Callable
from typing import Any

from rich.segment import Segment
from textual.color import Color
from textual.drivers import linux_driver
from textual.filter import LineFilter

BAD = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200b\u200e\u200f\u061c\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


class StripControls(LineFilter):
    """Removes control, bidi and invisible characters from drawn text; the driver's own control segments pass."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            part
            if part.control is not None or not BAD.search(part.text)
            else Segment(BAD.sub("", part.text), part.style)
            for part in segments
        ]


def _tolerant(encoding: str) -> Callable[..., codecs.IncrementalDecoder]:
    """`codecs.getincrementaldecoder`, but a byte that is not UTF-8 becomes U+FFFD instead of the app's end."""
    decoder = codecs.getincrementaldecoder(encoding)

    def build(errors: str = "replace") -> codecs.IncrementalDecoder:
        return decoder("replace")

    return build


class TolerantDriver(linux_driver.LinuxDriver):
    """The Linux driver that survives a Latin-1 paste or an old mouse report."""


def _under_tolerant_decoder(function: Any) -> Any:
    names = {**function.__globals__, "getincrementaldecoder": _tolerant}
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


# The same function with one global name exchanged; a driver without that name would read as strictly as before.
TolerantDriver.run_input_thread = _under_tolerant_decoder(linux_driver.LinuxDriver.run_input_thread)  # type: ignore[method-assign]
