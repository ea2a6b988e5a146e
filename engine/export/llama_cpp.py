"""What llama.cpp does itself where it is installed: K-quants, and answering beside the trained model as the judge of a GGUF.

Each call is a process of its own: a check that fails within llama.cpp ends its process with an abort, not an error.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import WorkbenchError, visible
from engine.export.places import COMMON_K_QUANTS, MXFP4, QUANTS, keeps_mxfp4
from engine.run.store import RunFolder

if TYPE_CHECKING:
    import torch

PROGRAM, PACKAGE = "llama-quantize", "llama_cpp"
OWN = (sys.executable, "-P", "-m", "engine.export.llama_cpp")


def makes_k_quants() -> bool:
    """Whether this machine has what makes K-quants."""
    return shutil.which(PROGRAM) is not None or installed()


def offered_quants(run: RunFolder) -> tuple[str, ...]:
    """The number formats of a GGUF that a list offers for this run on this machine."""
    own = (MXFP4,) if keeps_mxfp4(run) else ()
    return (*QUANTS, *own, *(COMMON_K_QUANTS if makes_k_quants() else ()))


def refuse_without_quantizer(quant: str) -> None:
    """Raises WorkbenchError where nothing here makes K-quants."""
    if not makes_k_quants():
        raise WorkbenchError(
            f"gguf: {quant} is made by llama.cpp, and neither its program {PROGRAM} nor the package llama-cpp-python is here.",
            f"Run `pip install llama-cpp-python` (it compiles for some minutes), put {PROGRAM} on the PATH, or take "
            "--quant Q8_0.",
        )


def installed() -> bool:
    """Whether the Python package of llama.cpp is here."""
    return importlib.util.find_spec(PACKAGE) is not None


def quantize(source: Path, target: Path, quant: str) -> None:
    """Writes the GGUF `source` in this format. Raises WorkbenchError with llama.cpp's last words where it fails."""
    program = shutil.which(PROGRAM)
    if program is not None:
        _run([program, str(source), str(target), quant], quant)
    else:
        _run(OWN, quant, {"do": "quantize", "source": str(source), "target": str(target), "quant": quant})


def widen(source: Path, target: Path) -> None:
    """Writes the GGUF `source` with all its numbers in float32, by llama.cpp's own reading of them.

    With any other format its products round what a layer is given to that format, which is no setting. Raises WorkbenchError
    with llama.cpp's last words where it fails.
    """
    _run(OWN, "reading its numbers", {"do": "quantize", "source": str(source), "target": str(target), "quant": "F32"})


def answers(file: Path, texts: Sequence[str], ids: Sequence[list[int]]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The ids that llama.cpp makes of each text, and its logits [tokens, vocabulary] for each list of ids, in float32.

    Raises WorkbenchError where it cannot open the file.
    """
    import numpy as np
    import torch

    with tempfile.TemporaryDirectory() as room:
        request = {
            "do": "answer",
            "file": str(file),
            "texts": list(texts),
            "ids": [list(each) for each in ids],
            "into": room,
        }
        said = json.loads(_run(OWN, "opening it", request))
        found = [torch.from_numpy(np.load(Path(room) / f"{number}.npy")) for number in range(len(ids))]
    return said, found


def _run(command: Sequence[str], what: str, request: dict[str, Any] | None = None) -> str:
    done = subprocess.run(command, input=json.dumps(request or {}), capture_output=True, text=True, errors="replace")
    if done.returncode:
        words = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        last = visible(words[-1])[:300] if words else "it said nothing"
        raise WorkbenchError(f"gguf: llama.cpp failed at {what} (exit code {done.returncode}): {last}")
    return done.stdout


def _quantize(request: dict[str, Any]) -> None:
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    if request["quant"] == "F32":
        settings.ftype, settings.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
    else:
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{request['quant']}")
    code = llama_cpp.llama_model_quantize(request["source"].encode(), request["target"].encode(), settings)
    if code:
        sys.exit(int(code))


def _answer(request: dict[str, Any]) -> None:
    import llama_cpp
    import numpy as np

    longest = max(map(len, request["ids"]), default=1)
    model = llama_cpp.Llama(
        request["file"], n_gpu_layers=0, n_ctx=longest, n_batch=longest, n_ubatch=longest, logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, verbose=False,
    )  # fmt: skip
    print(json.dumps([model.tokenize(text.encode(), add_bos=True, special=True) for text in request["texts"]]))
    for number, ids in enumerate(request["ids"]):
        model.reset()
        model.eval(ids)
        np.save(Path(request["into"]) / f"{number}.npy", np.array(model.scores[: len(ids)], dtype=np.float32))


if __name__ == "__main__":
    request = json.load(sys.stdin)
    {"quantize": _quantize, "answer": _answer}[request["do"]](request)
