"""Tiles are taken by measurement alone, kept per card, and never at the price of a torn file."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace

import pytest
import torch

from engine.kernels import tuner as package
from engine.kernels.linear_logp import linear_logp, linear_logp_reference, passes
from engine.kernels.linear_logp.tiles import GRADIENT_TILES, ROW_TILES
from engine.kernels.logp_entropy.launch import BACKWARD, FORWARD
from engine.kernels.norm_rope import BACKWARD as ROPE_BACKWARD
from engine.kernels.norm_rope import FORWARD as ROPE_FORWARD
from engine.kernels.rope import TILES as ROTATION
from engine.kernels.tuned import Entry, Kept
from engine.kernels.tuner import TUNER, Cost, Limits, Tiles, Tuner, bucket, choose

CPU = torch.device("cpu")
TILES = Tiles(
    "some_kernel", 1, ("block", "warps"), ((1024, 4), (2048, 4), (4096, 8)), lambda tile: Cost(tile[0] // 32, 128)
)


class Clock:
    """Times by the number of runs it was asked for, and what ran."""

    def __init__(self, *times):
        self.times, self.asked = times, 0

    def __call__(self, runs):
        self.asked += 1
        for run in runs:
            run()
        return list(self.times[: len(runs)])


@pytest.fixture
def tuner(tmp_path):
    """A tuner on, with a planted clock and a folder of its own."""

    def make(*times):
        made = Tuner()
        made.start(Clock(*times), lambda device: Kept(tmp_path / "card.json"))
        return made

    return make


def test_lengths_share_a_timing_up_to_the_next_power_of_two():
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 1024, 2048]


def test_off_and_without_a_card_the_hand_picked_tiles_are_taken_and_nothing_runs():
    ran = []
    assert Tuner().pick(TILES, (1,), CPU, ran.append) == (1024, 4)
    on = Tuner()
    on.start()
    assert on.pick(TILES, (1,), CPU, ran.append) == (1024, 4)
    assert (ran, on.picked) == ([], [])


def test_a_shape_of_the_same_bucket_never_gets_a_tile_that_is_none_of_its_own(tuner):
    made = tuner(2.0, 1.0, 3.0)
    assert made.pick(TILES, (1024,), CPU, lambda tile: None) == (2048, 4)
    fewer = replace(TILES, candidates=((1024, 4), (4096, 8)))
    assert made.pick(fewer, (1024,), CPU, lambda tile: None) in fewer.candidates
    assert made.pick(TILES, (1024,), CPU, lambda tile: None) == (2048, 4)


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        ((1.0, 0.5, 0.7), (2048, 4)),
        ((1.0, 0.99, 0.985), (1024, 4)),  # within the noise
        ((1.0, float("nan"), float("inf")), (1024, 4)),
        ((float("inf"), float("inf"), 3.0), (4096, 8)),
        ((float("nan"), 2.0, float("nan")), (2048, 4)),
        ((float("inf"),) * 3, (1024, 4)),
    ],
)
def test_another_tile_must_be_measured_faster(times, taken):
    assert choose(dict(zip(TILES.candidates, times, strict=True)), TILES.default) == taken


def test_a_key_is_timed_once_and_a_later_run_takes_what_was_kept(tuner):
    first, ran = tuner(1.0, 0.5, 0.7), []
    for _ in range(3):
        assert first.pick(TILES, (bucket(900), "bf16"), CPU, ran.append) == (2048, 4)
        assert first.pick(TILES, (bucket(1000), "bf16"), CPU, ran.append) == (2048, 4)
    assert ran == list(TILES.candidates)
    assert first.picked[0].words() == "some_kernel: block 2048, warps 4 (0.5 ms, by hand 1)"
    first.pick(TILES, (bucket(5000), "bf16"), CPU, ran.append)
    assert len(ran) == 6
    later = tuner(1.0, 9.0, 0.1)
    assert later.pick(TILES, (1024, "bf16"), CPU, ran.append) == (2048, 4)
    assert (len(ran), later.picked[0].origin) == (6, "kept")
    # A changed kernel, or tiles that are no longer a choice, are timed again.
    assert later.pick(replace(TILES, version=2), (1024, "bf16"), CPU, ran.append) == (4096, 8)
    fewer = replace(TILES, candidates=((1024, 4), (512, 4)))
    assert tuner(1.0, 2.0).pick(fewer, (1024, "bf16"), CPU, ran.append) == (1024, 4)


def test_tiles_that_do_not_do_the_same_are_compared_by_what_they_do(tuner):
    assert tuner(4.0, 3.0, 2.0).pick(TILES, (1,), CPU, lambda tile: None, lambda tile: {8: 1, 4: 4}[tile[1]]) == (
        2048,
        4,
    )


def test_tiles_beyond_the_registers_threads_or_shared_memory_of_a_card_are_not_tried():
    tiles = replace(TILES, candidates=((32, 1), (9000, 1), (64, 1)))
    assert tiles.fitting(Limits()) == ((32, 1), (64, 1))
    assert not Limits().allow(Cost(10, 2048))
    assert not Limits().allow(Cost(10, 32, 1 << 20))
    assert Limits(shared_bytes=2 << 20).allow(Cost(10, 32, 1 << 20))


@pytest.mark.parametrize(
    "tiles", [ROW_TILES, GRADIENT_TILES, FORWARD, BACKWARD, ROPE_FORWARD, ROPE_BACKWARD, ROTATION, passes.WORKSPACE]
)
def test_every_kernels_hand_picked_tile_fits_the_smallest_card(tiles):
    assert Limits().allow(tiles.cost(tiles.default))
    assert len(set(tiles.candidates)) == len(tiles.candidates) > 1
    assert all(len(tile) == len(tiles.names) for tile in tiles.candidates)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"a": 3}',
        '{"a": {"tile": ["x"], "times": []}}',
        '{"a": {"tile": [1]}}',
        "[" * 100_000,
        '{"a": {"tile": [1, 2], "times": [[]]}}',
        '{"a": {"tile": [1e400, 2], "times": []}}',
        '{"a": {"tile": [1.5, 2], "times": []}}',
        '{"a": {"tile": [1, 2], "times": [[1, 2, NaN]]}}',
        '{"a": {"tile": [true, 2], "times": []}}',
        f'{{"a": {{"tile": [1, 2], "times": [[1, 2, {10**400}]]}}}}',
        "\x00",
    ],
    ids=range(14),
)
def test_a_file_that_is_no_table_counts_as_empty_and_is_written_anew(tmp_path, text):
    kept = Kept(tmp_path / "card.json")
    kept.file.write_text(text)
    assert kept.find("a") is None
    entry = Entry((1, 2), {(1, 2): 0.5, (3, 4): 0.75})
    kept.keep("a", entry)
    assert kept.find("a") == entry


def test_a_folder_that_cannot_be_written_costs_the_next_run_its_timings_alone(tmp_path):
    (tmp_path / "file").write_text("")
    kept = Kept(tmp_path / "file" / "card.json")
    kept.keep("a", Entry((1,), {}))
    assert kept.problem.startswith("not kept for later runs: ")
    unlucky = Tuner()
    unlucky.start(Clock(1.0, 0.5, 0.7), lambda device: kept)
    assert unlucky.pick(TILES, (1,), CPU, lambda tile: None) == (2048, 4)
    assert unlucky.problems == ["not kept for later runs: File exists"]


def _write(file, process, count):
    for i in range(count):
        Kept(file).keep(f"{process}-{i}", Entry((process, i), {(process, i): 1.0}))


def test_processes_that_tune_at_once_lose_nothing_of_each_other(tmp_path):
    file, fork = tmp_path / "card.json", multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write, args=(file, process, 15)) for process in range(2)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        if file.exists():
            seen = max(seen, len(json.loads(file.read_bytes())))  # whole at every moment
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(json.loads(file.read_bytes())) == 30 >= seen
    assert [each.name for each in tmp_path.iterdir() if each.suffix not in (".json", ".lock")] == []


def test_the_chunk_that_was_timed_best_is_taken_and_changes_no_number(monkeypatch, tmp_path):
    hidden, weight = torch.randn(600, 8, requires_grad=True), torch.randn(64, 8)
    targets, room, rows = torch.randint(64, (600,)), 512 * 64 * 4, []
    plain = passes.Scores.fold

    def fold(self, part, *rest):
        rows.append(part.stop - part.start)
        return plain(self, part, *rest)

    monkeypatch.setattr(passes.Scores, "fold", fold)
    whole = linear_logp(hidden, weight, targets, workspace_bytes=room)
    assert rows == [512, 88]
    rows.clear()
    TUNER.start(Clock(1.0, 0.3, 0.2), lambda device: Kept(tmp_path / "card.json"))
    try:
        found = linear_logp(hidden, weight, targets, workspace_bytes=room)
        told = [each.words() for each in TUNER.picked]
    finally:
        TUNER.stop()
    assert rows == [512, 256, 128, 256, 256, 88]
    assert told[0].startswith("linear_logp_chunk: share 2")
    torch.testing.assert_close(found.log_probs, whole.log_probs)
    torch.testing.assert_close(found.log_probs, linear_logp_reference(hidden, weight, targets).log_probs)
    assert not TUNER.on
    assert package.TUNER.picked == []
