"""Which attention `auto` takes: torch's own, but where packed rows are kept apart on a card with a flash attention that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.facts import Facts, ModelFacts
from engine.features.attention_backend import unfit
from engine.hardware import parse_machine
from engine.planning.auto import effective, resolved
from engine.rules import read

ALL = {"flash-attn": "2.8", "flash-attn-3": "3.0", "flash-attn-4": "4.0"}
H100 = Facts(machine=parse_machine("1xH100-80GB"), model=ModelFacts("builtin/tiny", head_dim=128), packages=ALL)


def config(apart=True, dtype="bfloat16", compiled=False, **model):
    packed = {"packing": True, "packing_cross_doc_attn_mask": apart}
    return read(
        {
            "kernels": {"torch_compile": compiled},
            "model": {"name": "builtin/tiny", "dtype": dtype, **model},
            "data": {"train": [{"path": "rows.jsonl"}], **packed},
        }
    ).config


def taken(facts, **changes):
    given = config(**changes)
    entry = next(entry for entry in effective(given, facts) if entry.path == "model.attention")
    assert resolved(given, facts).model.attention == entry.effective
    return entry.effective, entry.reason


@pytest.mark.parametrize(
    ("card", "packages", "name"),
    [
        ("1xH100-80GB", ALL, "flash_attention_3"),
        ("1xB200-192GB", ALL, "flash_attention_4"),
        ("1xA100-80GB", ALL, "flash_attention_2"),
        ("1xH100-80GB", {"flash-attn": "2.8"}, "flash_attention_2"),
        ("1xH100-80GB", {"flash-attn-4": "4.0"}, "flash_attention_4"),
        ("1xA100-80GB", {"flash-attn-3": "3.0"}, "varlen"),
        ("1xH100-80GB", {"nvidia-cudnn-frontend": "1.18.0", "flash-attn": "2.8"}, "cudnn"),
        ("1xA100-80GB", {"nvidia-cudnn-frontend": "1.18.0"}, "varlen"),
        ("1xT4-16GB", ALL, "sdpa"),
        ("cpu", ALL, "sdpa"),
    ],
)
def test_packs_kept_apart_take_what_is_installed_and_made_for_the_card(card, packages, name):
    got, reason = taken(replace(H100, machine=parse_machine(card), packages=packages))
    assert got == name
    assert ("is installed" in reason) == (name.startswith("flash") or name == "cudnn")


@pytest.mark.parametrize("compiled", ["auto", True])
def test_layers_that_may_be_compiled_are_left_an_attention_that_compiled_layers_serve(compiled):
    """A package's flash attention would leave them uncompiled: a step over torch's own took 294 ms so, and 202 compiled."""
    for packages, name in ((ALL, "varlen"), ({**ALL, "nvidia-cudnn-frontend": "1.18.0"}, "cudnn")):
        facts = replace(H100, packages=packages)
        assert taken(facts, compiled=compiled)[0] == name
        long = config(compiled=compiled)
        long = long.model_copy(update={"optim": long.optim.model_copy(update={"max_steps": 1000})})
        assert resolved(long, facts).kernels.torch_compile is True
    assert "where kernels.torch_compile is false" in taken(H100, compiled=compiled)[1]
    assert taken(facts, compiled=compiled)[1].endswith("; the start measures it against varlen")


@pytest.mark.parametrize(
    ("times", "name"),
    [
        ({"cudnn": 1.0, "varlen": 1.5}, "cudnn"),
        ({"cudnn": 1.02, "varlen": 1.0}, "cudnn"),
        ({"cudnn": 1.1, "varlen": 1.0}, "varlen"),
        ({"flash_attention_2": 0.5, "cudnn": 1.1, "varlen": 1.0}, "flash_attention_2"),
        ({"cudnn": 2.0}, "cudnn"),
    ],
)
def test_what_was_measured_here_decides_and_the_order_within_3_percent(times, name):
    packages = {"nvidia-cudnn-frontend": "1.18.0", "flash-attn": "2.8"}
    got, reason = taken(replace(H100, packages=packages, attention_times=times))
    assert got == name
    assert ("measured here" in reason) is (len(times) > 1)
    if len(times) == 3:
        assert "cudnn 1.10 ms, flash_attention_2 0.50 ms, varlen 1.00 ms" in reason
        # One that layers may not be compiled with is none of them.
        assert taken(replace(H100, packages=packages, attention_times=times), compiled="auto")[0] == "varlen"


def test_where_numbers_must_repeat_no_time_decides():
    given = config()
    given = given.model_copy(update={"run": given.run.model_copy(update={"full_determinism": True})})
    facts = replace(H100, packages={"flash-attn": "2.8"})
    known = replace(facts, attention_times={"flash_attention_2": 2.0, "varlen": 1.0})
    assert taken(known)[0] == "varlen"
    assert resolved(given, known).model.attention == resolved(given, facts).model.attention


def test_wide_heads_and_float32_fall_back_with_the_reason():
    wide = replace(H100, model=ModelFacts("builtin/tiny", head_dim=512))
    got, reason = taken(wide)
    assert (got, "heads of 512 numbers are wider than the 256" in reason) == ("flex_attention", True)
    assert (
        taken(replace(H100, model=ModelFacts("builtin/tiny", head_dim=192), packages={"flash-attn-4": "4"}))[0]
        == "varlen"
    )
    got, reason = taken(H100, dtype="float32")
    assert (got, "16 bits only" in reason) == ("flex_attention", True)
    got, reason = taken(replace(H100, packages={"flash-attn": None}))
    assert (got, "flash-attn is not installed" in reason) == ("varlen", True)
    assert "seen at launch" in taken(replace(H100, packages=None))[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"packages": {}}, "the package nvidia-cudnn-frontend is not installed"),
        ({"machine": parse_machine("1xA100-80GB")}, "A100 is not a card of cudnn"),
        ({"machine": parse_machine("1xB200-192GB")}, "B200 is not a card of cudnn"),
        ({"model": ModelFacts("builtin/tiny", head_dim=256)}, "heads of 256 numbers are wider than the 128 of cudnn"),
        ({}, None),
    ],
)
def test_cudnn_serves_hopper_cards_with_its_package_and_heads_of_128(changes, reason):
    facts = replace(H100, **{"packages": {"nvidia-cudnn-frontend": "1.18.0"}, **changes})
    assert unfit("cudnn", config(), facts) == reason
    same = config().model_copy(update={"run": config().run.model_copy(update={"full_determinism": True})})
    assert unfit("cudnn", same, facts) is not None


def test_rows_that_are_whole_or_joined_take_torchs_own():
    assert taken(H100, apart=False)[0] == "sdpa"
    assert taken(Facts())[0] == "sdpa"


def test_models_that_torchs_own_has_no_form_for_take_eager():
    gemma = ModelFacts("builtin/tiny", model_type="gemma2", head_dim=256)
    for facts in (Facts(machine=parse_machine("cpu"), model=gemma), replace(H100, model=gemma)):
        got, reason = taken(facts, apart=False)
        assert (got, reason) == ("eager", "torch's fused attention has no form for gemma2")
    assert taken(Facts(model=replace(gemma, name="another")), apart=False)[0] == "sdpa"


@pytest.mark.parametrize(("asked", "reason"), [("sage", "no gradients"), ("sageattention", "no gradients"),
                                               ("kernels-community/flash-attn3", "such code is not run")])  # fmt: skip
def test_attention_of_elsewhere_is_refused_with_the_command_for_what_serves(asked, reason):
    (finding,) = (
        each for each in read({"version": 1, "model": {"attention": asked}}).findings if each.path == "model.attention"
    )
    assert finding.severity == "error"
    assert reason in finding.message
    assert "pip install flash-attn" in finding.message
    assert "Did you mean" not in finding.message


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("flash_attention_2", "`pip install flash-attn --no-build-isolation`"),
        (
            "flash_attention_3",
            "`pip install --no-build-isolation git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper`",
        ),
        ("flash_attention_4", "`pip install 'flash-attn-4>=4.0.0b1'`"),
    ],
)
def test_the_command_that_is_named_is_one_by_which_pip_finds_the_package(name: str, command: str) -> None:
    """PyPI has no release of the third but an empty one that was taken back, and betas alone of the fourth."""
    without = Facts(packages=dict.fromkeys(("flash-attn", "flash-attn-3", "flash-attn-4")))
    findings = read({"version": 1, "model": {"attention": name}}, without).findings
    assert any(command in finding.message for finding in findings if finding.path == "model.attention")
