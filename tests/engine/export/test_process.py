"""An export in its process: what it refuses is a sentence, and a cancelled one leaves nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import Cancelled, WorkbenchError
from engine.export.process import Export, request
from engine.run.store import RunFolder

Make = Callable[..., RunFolder]


def test_a_run_of_all_weights_has_nothing_to_merge(make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    with pytest.raises(WorkbenchError, match="no adapter, so there is nothing to merge") as refused:
        Export(request("merge", run.path, places={"safetensors": tmp_path / "out"})).run(lambda _: None)
    assert f"workbench export {run.id} --to safetensors" in refused.value.hint
    assert not (tmp_path / "out").exists()


def test_a_part_that_fails_leaves_the_others_and_cancelling_leaves_nothing(make_run: Make, tmp_path: Path) -> None:
    run = make_run(adapter={})
    (tmp_path / "there").write_text("of somebody else")
    asked = request(
        "export", run.path, places={"safetensors": tmp_path / "there", "adapter": tmp_path / "small"}, quant="F16"
    )
    result = Export(asked).run(lambda _: None)
    first, second = result["parts"]
    assert not first["ok"]
    assert "exists already" in first["error"]["message"]
    assert second["ok"]
    assert (tmp_path / "there").read_text() == "of somebody else"
    assert (tmp_path / "small/README.md").is_file()

    job = Export(request("merge", run.path, places={"safetensors": tmp_path / "out"}))
    seen: list[str] = []

    def cancel(message: dict[str, Any]) -> None:
        seen.append(message["progress"]["what"])
        if seen[-1] == "Opening it again":
            assert [name for name in os.listdir(tmp_path) if name.startswith(".out.part-")]
            job.cancel()

    with pytest.raises(Cancelled):
        job.run(cancel)
    assert seen[-1] == "Opening it again"
    assert sorted(os.listdir(tmp_path)) == ["base", "runs", "small", "there"]
