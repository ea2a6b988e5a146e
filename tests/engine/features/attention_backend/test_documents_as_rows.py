"""Packed rows kept apart where a model would forget it: layers that carry a state, and masks made without positions."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import ModelError
from engine.facts import state_kernels
from engine.features.attention_backend import MASKED_HERE, NOT_APART, STATES_SERVED, documents_as_rows
from engine.features.attention_backend import apply as attention_backend
from engine.features.built import Built
from engine.models.state_kernels import kernels_that_serve
from tests.engine.features.attention_backend.test_documents import config

BASE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
STATE: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
PERIODS = {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "afmoe": ("AfmoeForCausalLM", "AfmoeConfig", {"num_dense_layers": 2}),
    "bamba": ("BambaForCausalLM", "BambaConfig", {**STATE, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", {**STATE, "mamba_d_ssm": 32, "mamba_n_heads": 4}),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaConfig", {"state_size": 8}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
        {**STATE, "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 32},
    ),
    "jamba": ("JambaForCausalLM", "JambaConfig", {**PERIODS, "num_experts": 1, "mamba_dt_rank": 4}),
    "kimi_linear": (
        "KimiLinearForCausalLM", "KimiLinearConfig",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 16,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM", "Lfm2MoeConfig", {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"state_size": 8}),
    "mamba2": (
        "Mamba2ForCausalLM", "Mamba2Config",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM", "NemotronHConfig",
        {
            "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
            "hybrid_override_pattern": "M*",
        },
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", LINEAR),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}
    ),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", LINEAR),
    "qwen3_next": (
        "Qwen3NextForCausalLM", "Qwen3NextConfig", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}
    ),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", {"lru_width": 32}),
    "zamba2": (
        "Zamba2ForCausalLM", "Zamba2Config",
        {
            "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 8, "hybrid_layer_ids": [1],
            "layers_block_type": ["mamba", "hybrid"],
        },
    ),
}  # fmt: skip
BEFORE, OTHER, OURS, BEHIND = [5, 6, 7, 8, 9], [15, 16, 17, 18, 19], [21, 22, 23, 24], [31, 32, 33]


WIDER: dict[str, Any] = {
    "hidden_size": 128, "head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_head_dim": 32,
    "mamba_d_head": 32, "mamba_d_state": 16, "state_size": 16, "ssm_state_size": 16, "mamba_head_dim": 32, "mamba_headdim": 32,
    "mamba_d_ssm": 128, "lru_width": 128,
}  # fmt: skip
"""What the kernels of fla and mamba_ssm take at the least, for each setting that a family has."""


def made(family: str, *, wide: bool = False) -> Any:
    torch.manual_seed(0)
    name, kind, more = FAMILIES[family]
    settings = {**BASE, **more}
    if wide:
        settings |= {key: value for key, value in WIDER.items() if key in settings}
        if family == "mamba2":
            settings["head_dim"] = 32
    return getattr(transformers, name)(getattr(transformers, kind)(**settings)).train()


def batch(*packs: list[list[int]]) -> dict[str, torch.Tensor]:
    """Packs of documents of which `OURS` alone is learned."""
    from engine.data.collate import LanguageCollator

    rows = []
    for documents in packs:
        labels = [token if each is OURS else -100 for each in documents for token in each]
        ids = [token for each in documents for token in each]
        rows.append({"input_ids": ids, "labels": labels, "seq_lengths": list(map(len, documents))})
    return LanguageCollator(0)(rows)


def gradients(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**given).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learned_of_a_document_does_not_depend_on_its_neighbours(family: str) -> None:
    model = made(family)
    assert model.config.get_text_config().model_type == family
    packs = batch([BEFORE, OURS, BEHIND], [BEHIND, BEFORE])
    changed = batch([OTHER, OURS, BEHIND], [BEHIND, BEFORE])
    alone = gradients(model, {"input_ids": torch.tensor([OURS]), "labels": torch.tensor([OURS])})
    leaked = gradients(model, packs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    applied = attention_backend.prepare(config(), Built(model))
    assert applied is not None
    found, other = gradients(model, packs), gradients(model, changed)
    worst = max(float((found[name] - each).abs().max()) for name, each in alone.items())
    size = max(float(each.abs().max()) for each in alone.values())
    assert worst < 1e-5 * size
    assert all(torch.allclose(found[name], other[name], rtol=0, atol=1e-6 * size) for name in alone)
    applied.undo()
    model.gradient_checkpointing_disable()
    after = gradients(model, packs)
    assert all(torch.equal(after[name], each) for name, each in leaked.items())
    assert max(float((leaked[name] - each).abs().max()) for name, each in alone.items()) > 100 * worst


TAKING_BOUNDS = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


@contextlib.contextmanager
def by_bounds(model: Any) -> Iterator[list[tuple[int, int]]]:
    """Has the model's gated delta rule computed as flash-linear-attention computes it, over the documents between bounds of one
    row, by torch's form of it on each; gives the rows and documents of each call."""
    wrapper = vars(sys.modules[type(model).__module__])["torch_chunk_gated_delta_rule"]
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
    torchs, calls = cells["implementation"].cell_contents, list[tuple[int, int]]()

    def rule(
        q: Any, k: Any, v: Any, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None
    ) -> Any:
        bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        assert bounds[-1] == q.shape[1]
        calls.append((q.shape[0], len(bounds) - 1))
        pieces = [
            torchs(*(each[:, start:end] for each in (q, k, v)), g=g[:, start:end], beta=beta[:, start:end],
                   use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]
            for start, end in itertools.pairwise(bounds)
        ]  # fmt: skip
        return torch.cat(pieces, 1), None

    rule.__module__ = "fla.ops.gated_delta_rule.chunk"
    told = {
        "implementation": rule,
        "applicable_params": tuple(inspect.signature(rule).parameters),
        "is_new_implementation": True,
    }
    before = {name: cells[name].cell_contents for name in told}
    try:
        for name, value in told.items():
            cells[name].cell_contents = value
        yield calls
    finally:
        for name, value in before.items():
            cells[name].cell_contents = value


@pytest.mark.parametrize("family", TAKING_BOUNDS)
def test_kernels_that_take_bounds_get_all_documents_in_one_row(family: str) -> None:
    """The numbers are those of documents alone: neither the state nor the convolution reads over a bound."""
    model = made(family)
    with by_bounds(model) as calls:
        alone = gradients(model, {"input_ids": torch.tensor([OURS]), "labels": torch.tensor([OURS])})
        applied = attention_backend.prepare(config(), Built(model))
        assert applied is not None
        del calls[:]
        found = gradients(model, batch([BEFORE, OURS, BEHIND], [BEHIND, BEFORE]))
        assert calls == [(1, 6)]  # of 5, 4, 3, 3 and 5 tokens, and the padding
        other = gradients(model, batch([OTHER, OURS, BEHIND], [BEHIND, BEFORE]))
        size = max(float(each.abs().max()) for each in alone.values())
        assert all(torch.allclose(found[name], each, rtol=0, atol=1e-5 * size) for name, each in alone.items())
        assert all(torch.allclose(found[name], other[name], rtol=0, atol=1e-6 * size) for name in alone)


def test_a_layer_with_a_bias_gets_its_documents_as_rows() -> None:
    model = made("qwen3_5_text")
    mixer = next(each for each in model.modules() if hasattr(each, "in_proj_qkv"))
    mixer.in_proj_qkv = torch.nn.Linear(mixer.in_proj_qkv.in_features, mixer.in_proj_qkv.out_features)
    with by_bounds(model) as calls:
        applied = attention_backend.prepare(config(), Built(model))
        assert applied is not None
        gradients(model, batch([BEFORE, OURS, BEHIND], [BEHIND, BEFORE]))
        assert all(documents == 1 for _, documents in calls)
        assert max(rows for rows, _ in calls) > 1


@contextlib.contextmanager
def by_torch(model: Any) -> Iterator[None]:
    """Has torch's own form compute whatever a package's kernels compute in the model."""
    wrappers = [
        each for each in vars(sys.modules[type(model).__module__]).values()
        if inspect.isfunction(each) and "is_new_implementation" in each.__code__.co_freevars
    ]  # fmt: skip
    undo = []
    for wrapper in wrappers:
        cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
        own = cells["torch_function"].cell_contents
        told = {
            "implementation": own,
            "applicable_params": tuple(inspect.signature(own).parameters),
            "is_new_implementation": False,
        }
        undo += [(cells[name], cells[name].cell_contents) for name in told]
        for name, value in told.items():
            cells[name].cell_contents = value
    try:
        yield
    finally:
        for cell, value in undo:
            cell.cell_contents = value


def parted(family: str, dtype: torch.dtype, device: str = "cuda") -> dict[str, float]:
    """How far gradients of a document in a pack are from those that they should be, over the largest of those.

    `exact` is the document alone by torch's own form in float32; `rounding` how far it is alone, with this dtype and the
    installed kernels; `packed` how far it is in a pack that is kept apart; `again` what a second pass over that pack differs
    by, `neighbours` what other neighbours do; `leaking` how far it is in a pack that is not kept documents_as_rows.
    """
    with kernels_that_serve(family):
        model = made(family, wide=True).to(device)
    packs, changed = (batch([first, OURS, BEHIND], [BEHIND, BEFORE]) for first in (BEFORE, OTHER))
    lone = {"input_ids": torch.tensor([OURS]), "labels": torch.tensor([OURS])}
    lone, packs, changed = ({name: each.to(device) for name, each in given.items()} for given in (lone, packs, changed))
    with by_torch(model):
        exact = {name: each.float() for name, each in gradients(model, lone).items()}
    size = max(float(each.abs().max()) for each in exact.values())

    def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
        return max(float((one[name].float() - other[name].float()).abs().max()) for name in exact) / size

    model.to(dtype)
    rounding, leaking = distance(gradients(model, lone), exact), distance(gradients(model, packs), exact)
    applied = attention_backend.prepare(config(), Built(model))
    assert applied is not None
    found = gradients(model, packs)
    again, neighbours = distance(gradients(model, packs), found), distance(gradients(model, changed), found)
    return {
        "rounding": rounding,
        "packed": distance(found, exact),
        "again": again,
        "neighbours": neighbours,
        "leaking": leaking,
    }


def flaws(found: dict[str, float], dtype: torch.dtype) -> list[str]:
    """What in `parted`'s figures is more than rounding, whose size is measured beside it: alone, and over the same pack again."""
    least = max(1e-5, torch.finfo(dtype).eps)
    bounds = {"packed": 4 * found["rounding"] + least, "neighbours": 4 * found["again"] + least}
    wrong = [f"{name} {found[name]:.1e} is over {most:.1e}" for name, most in bounds.items() if not found[name] <= most]
    least = 3 * max(found["packed"], found["neighbours"])
    return [*wrong, *([] if found["leaking"] > least else [f"leaking {found['leaking']:.1e} is not over {least:.1e}"])]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((each, torch.float32) for each in sorted(STATES_SERVED)),
        *(
            (each, torch.bfloat16)
            for each in sorted(STATES_SERVED)
            if state_kernels.family(each) in state_kernels.LINEAR
        ),
    ],
    ids=str,
)
def test_packs_are_kept_apart_by_the_kernels_of_a_card(family: str, dtype: torch.dtype) -> None:
    """Those of fla, causal_conv1d and mamba_ssm where they are installed, which transformers takes by itself; torch's else.

    In 16 bits too where fla computes, whose products of float32 round to TF32. What each family gives is written at once:
    kernels are tuned for minutes, and a session may end before its report.
    """
    try:
        found = parted(family, dtype)
        wrong = flaws(found, dtype)
        said = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
    except Exception as problem:
        print(f"{family} {dtype}: {type(problem).__name__}: {problem}", file=sys.__stderr__, flush=True)
        raise
    print(f"{family} {dtype}: {said}; {'; '.join(wrong) or 'kept apart'}", file=sys.__stderr__, flush=True)
    assert not wrong


@pytest.mark.parametrize("family", ["mamba", "qwen3_next"])
def test_a_leak_is_told_from_rounding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judgement of the test for cards: sound as it stands, and not where each pack is read from its first token on."""
    assert flaws(parted(family, torch.float32, "cpu"), torch.float32) == []
    monkeypatch.setattr(documents_as_rows, "_by_document", lambda mixer, documents: mixer.forward)
    wrong = flaws(parted(family, torch.float32, "cpu"), torch.float32)
    assert len(wrong) == 3
    assert "packed" in wrong[0]


def test_every_family_that_is_served_is_tried() -> None:
    assert set(FAMILIES) == STATES_SERVED | MASKED_HERE


def test_a_model_that_cannot_keep_rows_apart_is_refused_by_its_type() -> None:
    model = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            vocab_size=61,
            word_embed_proj_dim=32,
        )
    )
    with pytest.raises(ModelError, match="models of type opt do not tell the rows of a pack apart"):
        attention_backend.prepare(config(), Built(model))
    assert attention_backend.prepare(config(apart=False), Built(model)) is None
    model.config.model_type = "something_new"
    model._is_stateful = True
    with pytest.raises(ModelError, match="something_new"):
        attention_backend.prepare(config(), Built(model))


def test_no_family_of_transformers_makes_its_mask_without_positions_unknown_to_us() -> None:
    """By their sources: what is found here for the first time after an update leaks until it is listed."""
    known, models = STATES_SERVED | MASKED_HERE | NOT_APART, Path(transformers.__file__).parent / "models"
    unknown = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        folder = kind.removesuffix("_text").replace("-", "_")
        source = models / folder / f"modeling_{folder}.py"
        if kind in known or not source.is_file():
            continue
        text = source.read_text("utf-8")
        calls = re.findall(r"create_causal_mask\(\n(.*?)\n\s*\)|mask_kwargs = \{(.*?)\}", text, re.DOTALL)
        forgets = any("position_ids" not in (call or mapping) and "mask_kwargs" not in call for call, mapping in calls)
        if "_is_stateful = True" in text or forgets:
            unknown.append(kind)
    # Their language models have types of their own, which are listed; the others write sound.
    assert set(unknown) <= {"qwen3_5", "qwen3_5_moe", "qwen4_exp", "musicgen", "musicgen_melody"}
