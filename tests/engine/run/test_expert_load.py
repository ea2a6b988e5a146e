"""The picture of experts' load: each digit against an even share, and lines that fit."""

from __future__ import annotations

from engine.run.expert_load import checked, differs_visibly, digits, explained, numbers, picture
from engine.run.view import RunView, fold


def test_a_digit_is_a_share_against_an_even_one() -> None:
    assert digits([4, 4, 4, 4]) == "5555"
    assert digits([8, 4, 2, 2]) == "7533"
    assert digits([1000, 0, 0, 0]) == "9000"
    assert digits([1, 0, 5000, 5000]) == "1077"
    assert digits([0, 0]) == "00"


def test_a_picture_is_another_where_a_load_doubled_or_came_from_none() -> None:
    assert not differs_visibly(["5432"], ["4543"])
    assert differs_visibly(["5432"], ["7432"])
    assert differs_visibly(["5431"], ["5430"])
    assert differs_visibly([], ["5"])


def test_lines_fit_and_tell_the_fullest_of_those_that_share_a_cell() -> None:
    rows = ["5" * 127 + "0", "09" * 64]
    narrow, wide = picture(rows, 80), picture(rows, 140)
    assert max(map(len, narrow)) <= 80
    assert wide[0] == f"0 {'▄' * 127}·  1"
    assert narrow[1] == f"1 {'█' * 64} 64"
    assert "holds 2 experts" in explained(rows, 80)
    assert "holds" not in explained(rows, 140)
    assert picture(["50"], 80, plain=True) == ["0 5. 1"]


def test_a_view_takes_the_newest_and_nothing_that_is_no_picture() -> None:
    view = fold(RunView("a"), [{"seq": 1, "t": 1.0, "kind": "experts", "load": ["57", "50"]}])
    assert view.experts == ["57", "50"]
    assert view.expert_layers == [0, 1]
    view = fold(view, [{"seq": 2, "t": 2.0, "kind": "experts", "load": ["57", "50"], "layers": [1, 12]}])
    assert picture(view.experts, 80, layers=view.expert_layers) == [" 1 ▄▆", "12 ▄· 1"]
    for odd in ([1], "12", [1, "2"], [-1, 2], [True, 2]):
        assert numbers(odd, view.experts) == [0, 1]
    for odd in (None, "57", ["5x"], ["5" * 2000], [5], ["5"] * 300):
        assert checked(odd) == []
