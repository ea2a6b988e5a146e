"""The page about other tools' configs: its table of counts is what the ledgers of the shared configs say.

`python tests/docs/test_bridge_page.py` writes it anew, from the data that WORKBENCH_TEST_DATA names.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from engine.bridge.ledger import OUTCOMES, Ledger
from engine.bridge.tools import take_over
from engine.config.files import load

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "configs-of-other-tools.md"
BEGIN, END = "<!-- counts -->\n", "<!-- end -->"
SHARED = (
    "axolotl/llama-3__instruct-dpo-lora-8b.yml",
    "axolotl/llama-3__lora-1b.yml",
    "axolotl/llama-3__qlora-1b-kto.yaml",
    "axolotl/llama-3__qlora-1b.yml",
    "axolotl/mistral__orpo__mistral-qlora-orpo.yml",
    "axolotl/qwen2_5-vl__lora-7b.yaml",
    "axolotl/qwen2__dpo.yaml",
    "axolotl/qwen2__reward-model.yaml",
    "axolotl/qwen3__qlora-fsdp.yaml",
    "axolotl/streaming__pretrain.yaml",
    "llama-factory/train_full__qwen3_full_sft.yaml",
    "llama-factory/train_lora__qwen3_lora_dpo.yaml",
    "llama-factory/train_lora__qwen3_lora_kto.yaml",
    "llama-factory/train_lora__qwen3_lora_pretrain.yaml",
    "llama-factory/train_lora__qwen3_lora_reward.yaml",
    "llama-factory/train_lora__qwen3_lora_sft.yaml",
)
"""The configs of other tools among the shared data."""


def read_shared(name: str, data: Path, out: Path) -> Ledger:
    """The ledger of a shared config, with LLaMA-Factory's list of data sets at hand."""
    return take_over(load(data / "configs" / name), out=out, lists=data / "llama-factory")


def table(data: Path, out: Path) -> str:
    """One row a config: its keys, and what became of them."""
    rows = []
    for name in SHARED:
        counts = read_shared(name, data, out).counts()
        keys = sum(counts[outcome] for outcome in OUTCOMES)
        cells = [str(counts[outcome]) for outcome in (*OUTCOMES, "defaults")]
        rows.append(f"| {name.replace('__', '/')} | {keys} | {' | '.join(cells)} |")
    head = ("file", "keys", *OUTCOMES.values(), "defaults told")
    return "\n".join((f"| {' | '.join(head)} |", f"| --- {'| ---: ' * (len(head) - 1)}|", *rows, ""))


def test_all_shared_configs_are_in_the_list(shared_data: Path) -> None:
    found = [str(path.relative_to(shared_data / "configs")) for path in (shared_data / "configs").rglob("*.y*ml")]
    assert sorted(found) == sorted(SHARED)


def test_the_table_is_what_the_ledgers_say(shared_data: Path, tmp_path: Path) -> None:
    _, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    assert rest.partition(END)[0] == table(shared_data, tmp_path), "run `make docs` with WORKBENCH_TEST_DATA"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        text = PAGE.read_text("utf-8")
        before, begin, rest = text.partition(BEGIN)
        made = table(Path(os.environ["WORKBENCH_TEST_DATA"]), Path(folder))
        PAGE.write_text(before + begin + made + END + rest.partition(END)[2], "utf-8")
