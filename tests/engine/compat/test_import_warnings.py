"""The log of a worker begins without the libraries' known complaints, and with every other one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

from engine.compat import import_warnings

KNOWN = [
    (
        "torchao",
        "Failed to load /env/torchao/_C_mxfp8.cpython-310-x86_64-linux-gnu.so: Could not load this library: /env/x.so",
    ),
    ("torchao", "Failed to load /env/torchao/_C.abi3.so: libcudart.so.13: cannot open shared object file"),
    (
        "torch.utils._pytree",
        "<enum 'KernelPreference'> is an Enum subclass and is now natively supported by torch.compile",
    ),
    (
        "bitsandbytes.backends.cpu.ops",
        "Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'.",
    ),
]
REAL = [
    ("torchao", "Failed to load /env/torchao/_C.abi3.so: undefined symbol: _ZN2at4_ops5zeros4callE"),
    ("torchao", "Skipping import of cpp extensions due to incompatible torch version."),
    ("torch.utils._pytree", "<class 'Point'> is already registered as pytree node."),
    ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community: bad magic number"),
    ("torchao.float8", "Failed to load /env/torchao/_C.abi3.so: Could not load this library"),
]


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def heard(names: set[str]) -> Iterator[Heard]:
    handler = Heard()
    for name in names:
        logging.getLogger(name).addHandler(handler)
    try:
        yield handler
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(handler)


def test_known_complaints_are_dropped_during_an_import_and_real_ones_are_told() -> None:
    with heard({name for name, _ in KNOWN + REAL if name != "torchao.float8"}) as handler:
        with import_warnings.dropped():
            for name, text in KNOWN + REAL:
                logging.getLogger(name).warning("%s", text)
        assert handler.messages == [text for _, text in REAL]
        handler.messages.clear()
        for name, text in KNOWN:
            logging.getLogger(name).warning("%s", text)
        assert handler.messages == [text for _, text in KNOWN]


def test_loggers_are_as_they_were_when_the_import_fails() -> None:
    before = {name: list(logging.getLogger(name).filters) for name, _ in KNOWN}
    with pytest.raises(ImportError), import_warnings.dropped():
        raise ImportError("no torch")
    assert {name: list(logging.getLogger(name).filters) for name, _ in KNOWN} == before
