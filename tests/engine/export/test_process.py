"""An export in its process: what it refuses is a sentence, and a cancelled one leaves nothing."""

from __future__ import annotations

import os
import sys
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
    assert f"workbench export {run.path} --to safetensors" in refused.value.hint  # no place where runs are looked for
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_folder_s_place_is_named(make_run: Make, tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("of somebody else")
    asked = request("export", make_run(adapter={}).path, places={"adapter": tmp_path / "afile/adapter"})
    (part,) = Export(asked).run(lambda _: None)["parts"]
    assert part["error"]["message"].endswith("afile: is a file, and results go into a folder.")
    assert (tmp_path / "afile").read_text() == "of somebody else"


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


def test_a_limit_on_files_in_the_middle_is_named_and_leaves_nothing(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_TESTS_WARM", "1")
    run = make_run(adapter={})
    limit = (
        "import resource, runpy, sys; sys.argv = ['export']; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); "
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); runpy.run_module('engine.export', run_name='__main__')"
    )
    asked = request("export", run.path, places={"safetensors": tmp_path / "new/out"}, quant="F16")
    part = Export(asked, (sys.executable, "-P", "-c", limit)).run(lambda _: None)["parts"][0]
    assert not part["ok"]
    assert "a file may not grow beyond 293 KiB here" in part["error"]["message"]
    assert part["error"]["hint"].endswith("then export again, or name another place with -o.")
    assert sorted(os.listdir(tmp_path)) == ["base", "runs"]


def test_a_merge_that_was_killed_is_begun_anew_and_leaves_nothing_of_itself(make_run: Make, tmp_path: Path) -> None:
    run = make_run(adapter={})
    asked = request("merge", run.path, places={"safetensors": tmp_path / "out"})
    job = Export(asked)

    def kill(message: dict[str, Any]) -> None:
        if message["progress"]["what"] == "Opening it again":
            assert job._process is not None
            job._process.kill()

    with pytest.raises(WorkbenchError, match=r"^the export ended: its process was killed\.$"):
        job.run(kill)
    left = [name for name in os.listdir(tmp_path) if "out" in name]
    assert "out" not in left
    assert any(name.startswith(".out.part-") for name in left), "it was killed in the middle"
    assert Export(asked).run(lambda _: None)["parts"][0]["ok"]
    assert sorted(os.listdir(tmp_path)) == ["base", "out", "runs"]
