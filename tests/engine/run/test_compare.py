"""What differs between runs: settings by their path, ends of curves, answers to the same prompts."""

from __future__ import annotations

from engine.run.compare import answers, describe_identical, differences, extremes, identical, shared_curves
from engine.run.series import Series
from engine.run.view import RunView


def view(name: str, prompts: dict[str, str], *curves: str) -> RunView:
    found = RunView()
    found.id, found.method = name, "sft"
    for curve in curves:
        found.series[curve] = Series()
    found.samples.extend(
        {"step": step, "index": 0, "prompt": prompt, "completion": f"{answer} {step}"}
        for step in (0, 5)
        for prompt, answer in prompts.items()
    )
    return found


def test_only_settings_that_are_not_the_same_in_all_are_told_and_a_runs_own_name_never() -> None:
    one = {
        "run": {"name": "a"},
        "optim": {"learning_rate": 1e-4, "lr": {}},
        "data": {"train": [{"path": "x"}]},
    }  # {} is nothing
    other = {"run": {"name": "b"}, "optim": {"learning_rate": 3e-4}, "data": {"train": [{"path": "x"}]}}
    third = {
        "run": {"name": "c", "seed": 3},
        "optim": {"learning_rate": 1e-4, "lr": {}},
        "data": {"train": [{"path": "y"}]},
    }
    assert differences([one, other]) == [("optim.learning_rate", (1e-4, 3e-4))]
    assert differences([one, other, third]) == [
        ("optim.learning_rate", (1e-4, 3e-4, 1e-4)),
        ("data.train", ([{"path": "x"}], [{"path": "x"}], [{"path": "y"}])),
        ("run.seed", (None, None, 3)),
    ]
    assert differences([one, one]) == []
    scored = {"method": {"beta": 0.1}, **third}
    assert [path for path, _ in differences([scored, one])] == ["data.train", "method.beta", "run.seed"]


def test_a_curve_and_a_prompt_that_one_run_alone_has_are_not_compared() -> None:
    views = [view("a", {"p": "A", "q": "A"}, "loss", "grad_norm"), view("b", {"p": "B"}, "grad_norm", "loss", "kl")]
    assert shared_curves(views) == ["loss", "grad_norm"]
    assert shared_curves([view("failed", {}), *views]) == ["loss", "grad_norm"]
    ((prompt, found),) = answers(views)
    assert prompt == "p"
    assert [sample and sample["completion"] for sample in found] == ["A 5", "B 5"]


def test_the_ends_of_a_curve_pass_over_what_is_not_finite() -> None:
    series = Series()
    for step, value in enumerate((3.0, float("nan"), 0.5, 2.0)):
        series.add(step, value)
    assert extremes(series) == (0.5, 3.0)
    assert extremes(Series()) is None


def test_runs_that_learned_alike_are_called_identical_however_quick_they_were() -> None:
    views = [view(name, {}, "loss", "tokens_per_second") for name in "abcd"]
    for number, each in enumerate(views):
        for step in range(30):
            each.series["loss"].add(step, 3.0 - 0.1 * step + (0.001 if number == 2 and step == 29 else 0.0))
            each.series["tokens_per_second"].add(step, 100.0 * number)
    views.append(view("nothing", {}, "loss"))
    assert identical("abcde", views) == [["a", "b", "d"]]
    assert describe_identical(identical("abcde", views)) == [
        "a, b and d are identical: each of their curves has the same values at every step."
    ]
    views[1].series["eval_loss"] = Series()
    views[1].series["eval_loss"].add(29, 1.0)
    assert identical("abcde", views) == [["a", "d"]], "one of them has a curve more"
