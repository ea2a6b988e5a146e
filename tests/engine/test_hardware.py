"""A machine that is not here can be described in a few letters, and nonsense is told what the form is."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

from engine import hardware
from engine.config.tree import RunConfig
from engine.data.gather_facts import gather_facts
from engine.errors import UsageError
from engine.hardware import CARDS, GiB, Machine, disk_free, installed, parse_machine, this_machine
from engine.rules import read


@pytest.mark.parametrize(
    ("text", "count", "name", "size", "capability"),
    [
        ("1xH100-80GB", 1, "H100", 80, (9, 0)),
        ("H100", 1, "H100", 80, (9, 0)),
        ("h100", 1, "H100", 80, (9, 0)),
        ("8xH200-141GB", 8, "H200", 141, (9, 0)),
        ("2 x A100-40GB", 2, "A100", 40, (8, 0)),
        ("A100-80GB", 1, "A100", 80, (8, 0)),
        ("RTX 4090", 1, "RTX4090", 24, (8, 9)),
        ("4090", 1, "RTX4090", 24, (8, 9)),
        ("NVIDIA L40S", 1, "L40S", 48, (8, 9)),
        ("T4", 1, "T4", 16, (7, 5)),
        ("V100-16GB", 1, "V100", 16, (7, 0)),
        ("RTX PRO 6000", 1, "RTXPRO6000", 96, (12, 0)),
        ("4xMyCard-48GB", 4, "MYCARD", 48, (8, 0)),
    ],
)
def test_cards_by_name(text: str, count: int, name: str, size: int, capability: tuple[int, int]) -> None:
    machine = parse_machine(text)
    assert len(machine.gpus) == count
    gpu = machine.gpus[0]
    assert (gpu.name, gpu.capability) == (name, capability)
    assert 0.95 * size * GiB < gpu.memory_bytes <= size * GiB
    assert machine.device == "cuda"


def test_a_cluster_is_nodes_of_a_machine() -> None:
    cluster = parse_machine("2x8xH100-80GB")
    assert (cluster.nodes, cluster.name, cluster.gpus) == (2, "2x8xH100-80GB", parse_machine("8xH100-80GB").gpus)
    assert parse_machine("8xH100-80GB").nodes is None, "one machine says nothing of others"
    with pytest.raises(UsageError, match="between 1 and 1024 nodes; got 0"):
        parse_machine("0x8xH100")


def test_a_cpu_is_a_machine_too() -> None:
    machine = parse_machine("cpu")
    assert (machine.gpus, machine.device) == ((), "cpu")
    assert machine.memory_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        "0xH100",
        "9999xH100",
        "H100-0GB",
        "H100-99999GB",
        "1x",
        "x" * 500,
        "H1OO",
        "12",
        "\x1b[31m",
        "H100 80GB 3",
    ],
)
def test_nonsense_names_the_form(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_machine(text)
    assert caught.value.exit_code == 2
    assert "\x1b" not in caught.value.message
    assert "--for: must " in caught.value.message


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(UsageError, match="Did you mean H100"):
        parse_machine("H1000")


def test_every_known_card_can_be_named() -> None:
    for card, (sizes, _) in CARDS.items():
        for size in sizes:
            assert parse_machine(f"1x{card}-{size}GB").gpus[0].name == card


def test_this_machine_is_known(tmp_path: Path) -> None:
    machine = this_machine(tmp_path / "not" / "there" / "yet")
    assert machine.cpu_count is not None
    assert machine.cpu_count >= 1
    assert machine.memory_bytes is not None
    assert machine.memory_bytes > GiB / 2
    assert machine.disk_free_bytes is not None
    assert machine.disk_free_bytes == pytest.approx(disk_free(tmp_path), rel=0.2)
    assert machine.name


def test_the_free_disk_is_that_of_the_folder_of_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that goes to a large disk is not refused, or described, by the small one that the config lies on."""
    monkeypatch.setattr("engine.hardware.disk_free", lambda folder: len(Path(folder).name))
    monkeypatch.chdir(tmp_path)

    def free(config: RunConfig, base: Path = tmp_path, runs: str | None = None) -> int | None:
        machine = gather_facts(config, base, sources=False, runs=runs).machine
        return machine and machine.disk_free_bytes

    plain = RunConfig()
    named = read({"run": {"output_dir": "scratch"}}).config
    assert (free(plain), free(named), free(named, runs="/large/disk-of-runs")) == (len("runs"), len("scratch"), 12)
    monkeypatch.setenv("WORKBENCH_RUNS", "/large/elsewhere")
    assert (free(plain), free(named)) == (len("elsewhere"), len("scratch"))


def test_the_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{3 * GiB}\n")
    real = Path

    def moved(place: object = ".") -> Path:
        return limit if str(place).startswith("/sys/fs/cgroup/memory.max") else real(str(place))

    monkeypatch.setattr(hardware, "Path", moved)
    hardware._memory_bytes.cache_clear()
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert hardware._memory_bytes() == min(total, 3 * GiB)
    finally:
        hardware._memory_bytes.cache_clear()


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "3000", "memory.current": "2500", "memory.stat": "anon 9\ninactive_file 400\n"}, 900),
        ({"memory.max": "3000", "memory.current": "3100", "memory.stat": ""}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "3000",
                "memory/memory.usage_in_bytes": "2500",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
            },
            600,
        ),
        ({"memory.max": "max", "memory.current": "2500", "memory.stat": ""}, None),
        ({}, None),
    ],
    ids=["limit", "over it", "version 1", "no limit", "no container"],
)
def test_a_container_leaves_less_memory(tmp_path: Path, files: dict[str, str], left: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    free = hardware.free_memory_bytes(tmp_path)
    assert free == left if left is not None else free > 1 << 20


def test_packages_by_their_metadata() -> None:
    assert installed("pydantic")
    assert installed("a-package-that-nobody-has") is None
    named = {each.metadata["Name"] for each in metadata.distributions()}
    assert {name: installed(name) for name in named} == {name: metadata.version(name) for name in named}


def test_a_smaller_distribution_of_the_same_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(hardware, "_distributions", hardware._distributions.__wrapped__)  # looks anew each time
    installed.cache_clear()
    if installed("mlflow") is None:  # where the whole one is not
        (tmp_path / "mlflow_skinny-3.17.2.dist-info").mkdir()
        (tmp_path / "mlflow_skinny-3.17.2.dist-info/METADATA").write_text("Name: mlflow-skinny\nVersion: 3.17.2\n")
        installed.cache_clear()
        assert installed("mlflow") == "3.17.2"
        (tmp_path / "mlflow_skinny-3.17.2.dist-info/METADATA").unlink()
        installed.cache_clear()
        assert installed("mlflow") is None, "an uninstall left an empty folder"
    installed.cache_clear()


def test_machines_are_values() -> None:
    assert parse_machine("H100") == parse_machine("1xH100-80GB")
    assert Machine() == Machine()


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        ("flags\t\t: fpu avx avx2 fma\n", True),
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512vl avx512dq\n", False),
        ("flags\t\t: fpu avx2 avx_vnni avx_ne_convert\n", False),
        ("Features\t: fp asimd bf16\n", False),  # not an x86: nothing is known
    ],
)
def test_a_processor_says_whether_bfloat16_is_slow_on_it(tmp_path: Path, text: str, slow: bool) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n" + text)
    assert hardware._slow_bfloat16(str(tmp_path / "cpuinfo")) is slow
    assert hardware._slow_bfloat16(str(tmp_path / "none")) is False


@pytest.mark.parametrize(
    ("cores", "own", "load", "share"),
    [(2, 2, 0.0, 1.0), (2, 2, 2.0, 0.5), (2, 2, 8.0, 0.2), (2, 2, 500.0, 0.1), (128, 2, 60.0, 1.0), (2, 2, 0.05, 1.0)],
)
def test_a_busy_machine_leaves_a_share_of_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, own: int, load: float, share: float
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(own)))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    hardware._cpu_share.cache_clear()
    assert this_machine().cpu_share == share
    hardware._cpu_share.cache_clear()
