"""What libraries say of themselves when they are imported on a machine that lacks parts of them nothing here uses.

Three sentences, each known by its logger and its words, are dropped for the length of one import: torchao's about binaries
made for another Python or for cards that are not here, torch's about two enumerations of torchao's, and bitsandbytes'
about a package of kernels that is not installed. A worker's log would begin with them, and people took them for the fault.
Whatever else these loggers say, and the same words at another time, is told as before. Standard library only.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

_KNOWN = {
    "torchao": re.compile(
        r"Failed to load \S*torchao\S*/_C\S*\.so: .*(Could not load this library|cannot open shared object file)",
        re.DOTALL,
    ),
    "torch.utils._pytree": re.compile(r"<enum '\w+'> is an Enum subclass and is now natively supported"),
    "bitsandbytes.backends.cpu.ops": re.compile(r"Failed to load CPU \w+ from kernels-community: No module named"),
}


@contextlib.contextmanager
def dropped() -> Iterator[None]:
    """Drops the known sentences while the block runs; the loggers are afterwards as they were."""
    filters = {name: _Without(pattern) for name, pattern in _KNOWN.items()}
    for name, each in filters.items():
        logging.getLogger(name).addFilter(each)
    try:
        yield
    finally:
        for name, each in filters.items():
            logging.getLogger(name).removeFilter(each)


class _Without(logging.Filter):
    """Lets every record pass but those whose text begins with the pattern."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        super().__init__()
        self._pattern = pattern

    def filter(self, record: logging.LogRecord) -> bool:
        return self._pattern.match(record.getMessage()) is None
