"""Experts and adapters on them are cut as transformers and PEFT lay them out, and start as one process draws them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch.nn.parallel import DistributedDataParallel

from engine.errors import ModelError
from engine.models.expert_shards import Group, Share, divide_experts, full_numel, is_divided, share_of, unsharded
from engine.models.stored_packed.linear import ignore_in_ddp
from tests.engine.features.families import made

ASKED: dict[str, Any] = {
    "r": 4,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


def of(rank: int, size: int = 2) -> Group:
    members: Any = None  # no messages here
    return Group(size, rank, size, members)


def adapted(family: str, group: Group | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    model = made(family)
    if group is not None:
        divide_experts(model, group)
    torch.manual_seed(1)
    with unsharded(model):
        return get_peft_model(model, LoraConfig(**ASKED))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_adapter_begins_as_that_of_one_process_and_is_cut_as_peft_lays_it_out(family: str, rank: int) -> None:
    whole, part = adapted(family), adapted(family, of(rank))
    theirs = dict(whole.named_parameters())
    assert {name for name, _ in part.named_parameters()} == theirs.keys()
    for name, weight in part.named_parameters():
        share = share_of(weight)
        assert torch.equal(weight, theirs[name] if share is None else share.of(theirs[name])), name
        assert (share is not None) is (".experts." in name), name
        assert full_numel(weight) == theirs[name].numel()
        assert weight.requires_grad is theirs[name].requires_grad
        if "lora_B" in name:
            torch.nn.init.normal_(theirs[name])
            weight.data = theirs[name].data if share is None else share.of(theirs[name].data)
    wrappers = [[each for each in model.modules() if isinstance(each, ParamWrapper)] for model in (whole, part)]
    assert len(wrappers[1]) == 4
    for complete, cut in zip(*wrappers, strict=True):
        expected = complete.get_delta_weight("default")[2 * rank : 2 * rank + 2]
        torch.testing.assert_close(cut.get_delta_weight("default"), expected)
        assert expected.any()


@pytest.mark.parametrize("inmost", [False, True])
def test_parts_are_put_together_as_they_were(inmost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (6, 12) if inmost else (12, 6)
    weight = torch.arange(72).view(shape)
    shares = [Share(4, of(rank), inmost) for rank in (0, 1)]
    parts = [share.of(weight) for share in shares]

    def gathered(into: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        for place, part in zip(into, parts, strict=True):
            place.copy_(part)

    monkeypatch.setattr(torch.distributed, "all_gather", gathered)
    for share, part in zip(shares, parts, strict=True):
        assert torch.equal(share.together(part), weight)
        assert share.full_shape(part) == weight.shape


def test_what_is_of_one_process_is_not_averaged() -> None:
    model = adapted("gpt_oss", of(1))
    ignore_in_ddp(model)
    left: Any = model._ddp_params_and_buffers_to_ignore
    assert set(left) == {name for name, _ in model.named_parameters() if ".experts." in name}
    assert any(name.endswith("down_proj_bias") for name in left)
    assert any(".experts." in name and "lora_A" in name for name in left)
    assert callable(DistributedDataParallel._set_params_and_buffers_to_ignore_for_model)


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ModelError, match="expert_parallel_size: must divide the 4 experts of Qwen3MoeExperts; got 3"):
        divide_experts(made("qwen3_moe"), of(0, 3))
    dense = made("qwen3")
    with pytest.raises(ModelError, match="must be 1 with Qwen3ForCausalLM; got 2: it has no experts"):
        divide_experts(dense, of(0))
    assert not is_divided(dense)
