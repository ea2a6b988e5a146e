"""What is kept of a library's look at itself is what it would find, and is found anew where anything changed."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.compat import import_scans

IMPORTED = """
import importlib.metadata, inspect, json, sys
before = importlib.metadata.packages_distributions, inspect.getframeinfo
from engine.compat import import_scans
reads = []
sys.addaudithook(lambda event, given: reads.append(str(given[0])) if event == "open" else None)
with import_scans.kept():
    import transformers, transformers.models
    packages = {name: sorted(each) for name, each in importlib.metadata.packages_distributions().items()}
from transformers.utils import import_utils
assert (importlib.metadata.packages_distributions, inspect.getframeinfo) == before
assert not any(type(each).__module__ == import_scans.__name__ for each in sys.meta_path)
assert type(import_utils.__loader__).__name__ == type(import_utils.__spec__.loader).__name__ == "SourceFileLoader"
from pathlib import Path
models = Path(transformers.__file__).parent / "models"
plain = inspect.unwrap(import_utils.define_import_structure)
assert {"qwen3", "llama"} <= set(dir(transformers.models))
sources = sum(read.startswith(str(models)) and read.endswith(".py") for read in reads)
given, found = import_utils.define_import_structure(models, prefix="models"), plain(models, prefix="models")
same = all(given[needed][file] == names for needed, files in found.items() for file, names in files.items())
same = same and len(given) == len(found)  # transformers has added its own names beside those of models
inner = models / "__init__.py"
same = same and import_utils.define_import_structure(str(inner)) == plain(str(inner))
theirs = {name: sorted(each) for name, each in before[0]().items()}
transformers.Qwen3Config(), transformers.AutoTokenizer
print(json.dumps([same, packages == theirs, sources]))
"""


def imported(cache: Path) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env={**os.environ, "WORKBENCH_CACHE": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(240)
def test_the_second_start_reads_no_source_of_models_and_finds_the_same(tmp_path: Path) -> None:
    same, packages, sources = imported(tmp_path)
    assert (same, packages) == (True, True)
    assert sources > 1000
    same, packages, sources = imported(tmp_path)
    assert (same, packages) == (True, True)
    assert sources < 100


def test_what_is_kept_and_is_something_else_is_found_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    (models := tmp_path / "models").mkdir()
    names, scans = {frozenset({"torch"}): {"one": {"One"}}}, []

    def scan(folder: Path, prefix: str | None = None) -> dict[frozenset[str], dict[str, set[str]]]:
        scans.append(folder)
        return names

    def looked() -> int:
        scans.clear()
        assert import_scans._scanned_once(scan, "5")(models, prefix="models") == names
        with import_scans.kept():
            found = importlib.metadata.packages_distributions()
        assert found == import_scans._plain_distributions()
        return len(scans)

    assert (looked(), looked()) == (1, 0)
    for file in (tmp_path / "cache" / "imports").glob("*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "found": [[1, 2]]}))
    assert (looked(), looked()) == (1, 0)


def test_a_package_that_is_installed_since_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    with import_scans.kept():
        assert "brought_later" not in importlib.metadata.packages_distributions()
    (folder / "later-1.0.dist-info").mkdir()
    (folder / "later-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    (folder / "later-1.0.dist-info" / "top_level.txt").write_text("brought_later\n")
    with import_scans.kept():
        assert importlib.metadata.packages_distributions()["brought_later"] == ["later"]


def test_a_copy_that_is_worked_on_is_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "packages"
    for name, version, direct in (
        ("one", "1.0", None),
        ("two", "1.0.dev0", None),
        ("three", "1.0", '{"dir_info": {"editable": true}}'),
    ):
        place = folder / f"{name}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if direct:
            (place / "direct_url.json").write_text(direct)
    monkeypatch.syspath_prepend(str(folder))
    assert import_scans._release("one") is not None
    assert [import_scans._release(name) for name in ("two", "three", "no-such-package")] == [None, None, None]


def test_torch_has_frames_without_their_source_and_others_have_what_they_ask_for() -> None:
    from torch._library.utils import get_source

    seen = []
    plain = inspect.findsource

    def findsource(frame):
        seen.append(frame)
        return plain(frame)

    with import_scans.kept(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "findsource", findsource)
        assert get_source(1).startswith(__file__)
        assert seen == []
        assert inspect.getframeinfo(inspect.currentframe()).code_context is not None
        assert inspect.getframeinfo(inspect.currentframe(), 3).code_context is not None
        # A library may look at its callers while it is imported.
        assert inspect.stack()[0].code_context is not None
        assert inspect.stack(0)[0].filename == __file__


def test_what_may_be_in_the_middle_of_an_installation_is_not_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "packages"
    folder.mkdir()
    long_ago = 1_600_000_000
    monkeypatch.setattr(sys, "path", [str(folder)])

    def kept() -> int:
        with import_scans.kept():
            importlib.metadata.packages_distributions()
        return len(list((tmp_path / "cache" / "imports").glob("*.json")))

    assert kept() == 0
    os.utime(folder, (long_ago, long_ago))
    assert kept() == 1


def test_a_file_that_none_of_ours_wrote_is_not_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    import_scans._write("x", ["a"])
    monkeypatch.setattr(import_scans, "LARGEST", 5)
    assert import_scans._read("x") is None


def test_a_folder_of_others_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    import_scans._write("x", {"a": ["b"]})
    assert import_scans._read("x") == {"a": ["b"]}
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "cache" / "imports").rename(elsewhere)
    (tmp_path / "cache" / "imports").symlink_to(elsewhere)
    assert import_scans._read("x") is None


def test_folders_that_change_all_the_time_do_not_push_out_what_was_found_in_transformers(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    import_scans._write("models 5", ["a"])
    for number in range(20):
        import_scans._write(f"distributions {number}", {"a": ["b"]})
    assert import_scans._read("models 5") == ["a"]
    assert import_scans._read("distributions 19") == {"a": ["b"]}
    assert len(list((tmp_path / "imports").iterdir())) == 9
