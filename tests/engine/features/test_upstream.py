"""What features take from other packages, name by name: an upgrade that changes one fails here and says which."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
from accelerate.utils.fsdp_utils import get_parameters_from_modules
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.data import BatchSampler
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, spawn_materialize
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import GRPOTrainer
from trl.trainer import utils as trl_utils

from engine.compat.cache_names import CACHE
from engine.compat.causal_masks import none_needed
from engine.compat.collective_waits import time_model, when_computed
from engine.compat.flight_recorder import SIZE
from engine.compat.fsdp2 import _reshards, begin_passes_anew, kept_together, wrap_what_is_there
from engine.compat.ring_attention import NAME as RING
from engine.compat.ring_attention import ring_attention, ring_attention_forward
from engine.compat.staging import copy_into, room_for
from engine.compat.trl_head import FusedForward, head_settings
from engine.features.cut_cross_entropy.apply import CutCrossEntropy
from engine.features.fused_norm_rope.apply import CLASSES
from tests.engine.features.conftest import tiny_model

FREE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def names(function: Callable[..., Any]) -> list[str]:
    return [each.name for each in inspect.signature(function).parameters.values() if each.kind not in FREE]


def asked(function: Callable[..., Any], given: tuple[str, ...], by_name: tuple[str, ...] = ()) -> None:
    """The function takes these first, in this order, those by name, and can do without whatever else it takes."""
    parameters = list(inspect.signature(function).parameters.values())
    assert tuple(each.name for each in parameters[: len(given)]) == given
    rest = {each.name: each for each in parameters[len(given) :]}
    assert set(by_name) <= set(rest)
    assert all(name in by_name or each.kind in FREE or each.default is not each.empty for name, each in rest.items())


def test_trls_fused_head_has_the_settings_and_answers_that_ours_stands_for():
    outputs = "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"
    model = tiny_model()
    assert head_settings(model) is None
    trl_utils.add_fused_lm_head(model, temperature=0.7, outputs=outputs)
    settings = head_settings(model)
    assert settings is not None, "the free variables of TRL's forward have other names"
    assert (settings.temperature, settings.outputs, settings.in_float32) == (0.7, outputs, False)
    assert (settings.soft_cap, settings.logit_scale, settings.plain.__self__) == (None, 1.0, model)
    theirs = model.forward
    assert [name for name, each in inspect.signature(theirs.__func__, follow_wrapped=False).parameters.items() if each.kind is each.KEYWORD_ONLY] == [
        "fused_lm_head", "labels", "shift_labels", "num_items_in_batch"
    ]  # fmt: skip
    ours = FusedForward(model, settings, CutCrossEntropy())
    ids = torch.randint(128, (2, 7))
    labels = ids.masked_fill(torch.rand(2, 7) < 0.5, -100)
    for given in ({"labels": labels}, {"shift_labels": labels}, {"labels": labels, "num_items_in_batch": 5}):
        plain, found = (forward(ids, fused_lm_head=True, **given) for forward in (theirs, ours))
        assert type(found) is type(plain)
        assert list(found) == list(plain)
        for name in plain:
            torch.testing.assert_close(found[name].float(), plain[name].float(), msg=name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    torch.testing.assert_close(ours(ids, labels=labels).loss, theirs(ids, labels=labels).loss)


def test_trl_asks_for_log_probabilities_as_our_passes_are_made_of():
    given = ("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size")
    asked(GRPOTrainer._get_per_token_logps_and_entropies, given)
    assert "compute_entropy" in names(GRPOTrainer._get_per_token_logps_and_entropies)


@pytest.mark.parametrize("module", CLASSES)
def test_a_fused_attention_class_is_called_as_our_forward_is(module):
    kind = getattr(importlib.import_module(module), CLASSES[module].name)
    # Decoder layers name every argument, and classes with positions of three axes have them in another order.
    known = ("position_embeddings", "attention_mask", CACHE)
    known += ("shared_kv_states",) if CLASSES[module].sharing else ()
    asked(kind.forward, ("self", "hidden_states"), known)
    source = inspect.getsource(importlib.import_module(module))
    for name in ("hidden_states", *known):
        assert f"{name}={name}," in source
    eager = importlib.import_module(module).eager_attention_forward
    if not CLASSES[module].normed:
        asked(importlib.import_module(module).apply_rotary_pos_emb, ("q", "k", "cos", "sin"))
    asked(eager, ("module", "query", "key", "value", "attention_mask"), ("scaling", "dropout"))
    assert any(each.kind is each.VAR_KEYWORD for each in inspect.signature(kind.forward).parameters.values())


def test_the_table_of_attention_functions_is_asked_by_name_with_a_form_to_fall_back_on():
    asked(ALL_ATTENTION_FUNCTIONS.get_interface, ("attn_implementation", "default"))
    assert {"sdpa", "flex_attention", "flash_attention_2"} <= set(ALL_ATTENTION_FUNCTIONS)


def test_a_lora_layer_of_peft_has_what_closed_form_reads():
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 3)), LoraConfig(r=2, target_modules=["0"]))
    layer = model.base_model.model[0]
    read = ("lora_A", "lora_B", "scaling", "lora_dropout", "lora_variant", "lora_bias", "base_layer", "fan_in_fan_out")
    assert all(hasattr(layer, name) for name in (*read, "disable_adapters", "merged", "active_adapters"))
    assert isinstance(layer, LoraLayer)
    assert type(layer) is LoraLinear
    assert names(LoraLinear.forward) == ["self", "x"]
    assert layer.active_adapters == ["default"]
    assert type(layer.lora_dropout["default"]) is torch.nn.Identity
    assert not layer.lora_variant
    assert not layer.lora_bias["default"]


def test_layers_with_checkpoints_keep_their_function_and_modules_their_compiled_call_under_the_names_we_set():
    assert isinstance(GradientCheckpointingLayer.gradient_checkpointing, bool)
    source = inspect.getsource(importlib.import_module("transformers.modeling_utils")) + inspect.getsource(
        importlib.import_module("transformers.modeling_layers")
    )
    assert "_gradient_checkpointing_func" in source
    layer = torch.nn.Linear(2, 2)
    layer._compiled_call_impl = lambda *args, **kwargs: "ours"
    assert layer(torch.zeros(1, 2)) == "ours"
    assert torch.equal(layer._call_impl(torch.zeros(1, 2))[0], layer.bias)


def test_four_bit_weights_are_made_wide_by_the_call_that_we_make():
    functional = pytest.importorskip("bitsandbytes.functional")
    asked(functional.dequantize_4bit, ("A", "quant_state"))
    layer = importlib.import_module("bitsandbytes").nn.Linear4bit(64, 64, bias=False, quant_type="nf4")
    assert {"compute_dtype", "compute_type_is_set"} <= set(vars(layer))
    assert type(layer).__module__.startswith("bitsandbytes.")


def test_a_weight_that_is_not_read_yet_tells_what_it_would_be_read_from():
    """Packing reads experts that a file holds in one weight a slice at a time."""
    job = spawn_materialize(None, torch.arange(6.0), "cpu", torch.bfloat16)
    told = inspect.getclosurevars(job).nonlocals
    assert torch.equal(told["tensor"][2:3], torch.tensor([2.0]))
    assert (told["device"], told["dtype"]) == ("cpu", torch.bfloat16)


def test_libraries_look_at_their_files_by_the_names_that_are_kept():
    from torch._library import utils as torch_library
    from transformers.utils import import_utils
    from trl import import_utils as trl_import_utils

    assert list(inspect.signature(import_utils.define_import_structure).parameters) == ["module_path", "prefix"]
    assert "getframeinfo" in inspect.getsource(torch_library.get_source)
    assert "packages_distributions()" in inspect.getsource(trl_import_utils)


def test_the_compiler_says_when_it_begins_and_ends():
    from engine.compat.compiler_events import watch_compiler

    said = []
    torch._dynamo.reset()
    undo = watch_compiler(lambda: said.append("begun"), lambda: said.append("done"))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    undo()
    assert said == ["begun", "done"]
    torch._dynamo.reset()
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert said == ["begun", "done"]


def test_backbones_take_their_masks_by_kinds_of_layers():
    """`engine.compat.causal_masks`: a mapping is taken as it is, and sdpa is causal where the mask of its kind is none."""
    model = tiny_model()
    backbone, ids = model.base_model, torch.arange(1, 9)[None]
    assert none_needed(backbone) == {"full_attention": None}
    assert torch.equal(
        backbone(ids, attention_mask={"full_attention": None}).last_hidden_state, backbone(ids).last_hidden_state
    )


def test_the_compiler_has_the_settings_that_features_put_into_it():
    from torch._inductor import config

    assert all(hasattr(config, name) for name in ("deterministic", "post_grad_custom_post_pass"))


def test_accelerate_finds_the_last_norm_of_a_model_without_an_adapter_alone():
    """`engine.compat.fsdp2.shard_heads_with_norms`: where it finds that of an adapted one too, it is no longer needed."""
    model = tiny_model()
    assert fsdp_utils._find_final_norm(model) is model.model.norm
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert fsdp_utils._find_final_norm(adapted) is None
    assert adapted.get_base_model() is model
    assert names(Accelerator._prepare_fsdp2) == ["self"]


def test_torch_has_a_ring_and_accelerate_deals_batches_by_what_we_set():
    """`engine.compat.ring_attention` and `engine.trainers.context_parallel`; a process alone is a ring of one."""
    assert {"buffers", "buffer_seq_dims", "no_restore_buffers"} <= set(names(context_parallel))
    share = BatchSamplerShard(BatchSampler(range(5), 2, False), num_processes=4, process_index=3)
    share.num_processes, share.process_index, share.even_batches = 1, 0, False
    assert list(share) == [[0, 1], [2, 3], [4]]
    model, torchs_own = tiny_model(), functional.scaled_dot_product_attention
    before = model.config._attn_implementation
    told = {
        "inputs_embeds": torch.zeros(1, 4, 8),
        CACHE: None,
        "position_ids": torch.tensor([[0, 1, 6, 7]]),
    }
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with ring_attention(model, init_device_mesh("cpu", (1,))):
            assert model.config._attn_implementation == RING
            assert ALL_ATTENTION_FUNCTIONS[RING] is ring_attention_forward
            assert functional.scaled_dot_product_attention is not torchs_own
            # Places that jump would be taken for documents of a pack, which a mask keeps apart.
            assert create_causal_mask(config=model.config, attention_mask=None, **told) is None
    finally:
        torch.distributed.destroy_process_group()
    assert model.config._attn_implementation == before
    assert functional.scaled_dot_product_attention is torchs_own
    assert create_causal_mask(config=model.config, attention_mask=None, **told) is not None


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """A mesh of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_shares_are_copied_as_torchs_own_checkpoints_copy_them(one_rank: Any) -> None:
    share = distribute_tensor(torch.arange(4.0), one_rank, [Shard(0)])
    state = {"weight": share, "step": torch.tensor(3.0)}
    room = room_for(state)
    assert isinstance(room["weight"], DTensor)
    assert (room["weight"].placements, room["weight"].shape) == (share.placements, share.shape)
    assert room["weight"].to_local().tolist() == [0] * 4
    copy_into(room, state)
    share.to_local().fill_(9)
    assert (room["weight"].to_local().tolist(), room["step"].item()) == ([0, 1, 2, 3], 3)
    copy_into(room, state)
    assert room["weight"].to_local().tolist() == [9] * 4


def test_layers_stay_together_while_they_are_asked_to(one_rank: Any) -> None:
    layers: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for layer in layers:
        fully_shard(layer, mesh=one_rank)
    fully_shard(layers, mesh=one_rank, reshard_after_forward=False)
    before = [_reshards(each) for each in (*layers, layers)]
    assert before == [True, True, False]
    with kept_together(layers), torch.no_grad():
        layers(torch.ones(1, 4))
        assert not any(isinstance(weight, DTensor) for weight in layers.parameters())
    assert all(isinstance(weight, DTensor) for weight in layers.parameters())
    assert [_reshards(each) for each in (*layers, layers)] == before
    with torch.no_grad():
        layers(torch.ones(1, 4))
    assert isinstance(layers[0].weight, DTensor)


class _Moments:
    """Marks and their ends, counted."""

    def __init__(self) -> None:
        self.begun, self.ended = 0, 0

    def mark(self) -> float:
        self.begun += 1
        return 0.0

    def until(self, begun: float | None) -> None:
        self.ended += begun is not None


def test_fsdp2_waits_for_others_in_the_calls_that_are_timed(one_rank: Any) -> None:
    layers: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(layers, mesh=one_rank)
    moments = _Moments()
    assert time_model(layers, moments) == 1
    state = layers._get_fsdp_state()
    (group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one, in torch 2.11
    for name in ("wait_for_unshard", "post_backward", "finalize_backward"):  # what is timed on a GPU
        assert callable(getattr(group, name)), name
    assert group._all_gather_result is None
    assert group._post_reduce_event is None
    assert not group._is_hsdp
    source = inspect.getsource(type(group).post_backward)
    assert source.index("_wait_for_post_backward()") < source.index("foreach_reduce("), (
        "it waits before it asks for memory"
    )
    assert "self.wait_for_unshard()" in inspect.getsource(type(group).pre_forward)
    group._all_gather_comm(torch.empty(4), torch.ones(4), one_rank.get_group())
    group._reduce_scatter_comm(torch.empty(4), torch.ones(4), one_rank.get_group(), torch.distributed.ReduceOp.SUM)
    assert moments.ended == 2
    assert group._reduce_scatter_comm.allocate((2,), dtype=torch.float32, device=torch.device("cpu")).shape == (2,)


class _ReadsItsHead(torch.nn.Module):
    """A model whose loss reads the head's weight, so that the head has no pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


def test_what_is_shared_out_as_one_is_put_together_after_a_pass_that_some_of_it_sat_out(one_rank: Any) -> None:
    model: Any = _ReadsItsHead()
    fully_shard([model.embed, model.head], mesh=one_rank)
    fully_shard(model, mesh=one_rank)
    begin_passes_anew(model)
    with torch.no_grad():
        model(torch.arange(4))
    model.state_dict()  # a save shares everything out
    model(torch.arange(4)).sum().backward()
    assert model.embed.weight.grad.full_tensor().eq(1).all()


def test_ddp_waits_for_gradients_after_what_was_asked_of_the_backward_pass_before(one_rank: Any) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(4))
    moments = _Moments()
    order: list[str] = []
    assert time_model(model, moments) == 1

    def send(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        message: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def arrive() -> None:
            order.append("arrived")
            message.set_result(bucket.buffer())

        order.append("sent")
        threading.Timer(0.3, arrive).start()
        return message

    model.register_comm_hook(None, lambda _, bucket: send(bucket))
    loss = model(torch.randn(3, 4)).square().sum()
    assert (moments.begun, moments.ended) == (1, 1), "its buffers were sent around"
    when_computed(loss, lambda: order.append("computed"))
    loss.backward()
    assert order == ["sent", "computed", "arrived"]


def test_accelerate_still_ends_where_a_model_lacks_a_layer_that_its_class_names() -> None:
    def plugin() -> FullyShardedDataParallelPlugin:
        return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")

    model = torch.nn.ModuleDict({"tower": torch.nn.Sequential(torch.nn.GELU()), "layer": torch.nn.Linear(2, 2)})
    model._no_split_modules = ["Linear", "GELU", "Nowhere"]  # type: ignore[assignment]
    with pytest.raises(ValueError, match="Nowhere"):
        plugin().set_auto_wrap_policy(model)
    for apart, there in (((), ["GELU", "Linear"]), (("tower",), ["Linear"])):
        ours: Any = plugin()
        wrap_what_is_there(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=ours)), model, apart)  # type: ignore[arg-type]
        assert ours.transformer_cls_names_to_wrap == there
        ours.set_auto_wrap_policy(model)
    left = get_parameters_from_modules(ours.ignored_modules, torch.nn.ModuleDict({"tower": model["layer"]}), "cpu")
    assert left == set(model["layer"].parameters()), "what stays whole is named by an expression"


_RECORDED = """
import time
import torch
import torch.distributed as dist
from engine.compat.flight_recorder import last_collective
assert last_collective() is None
dist.init_process_group("gloo", init_method="file://{place}", rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
dist.barrier()
dist.all_reduce(torch.ones(3))
give_up = time.monotonic() + 60
while last_collective().active and time.monotonic() < give_up:
    time.sleep(0.01)  # a thread of the group notes a moment later that it is over
print(last_collective())
dist.destroy_process_group()
"""


def test_torch_records_which_collective_came_last(tmp_path: Path) -> None:
    """In a process of its own: torch reads once how many it is to keep."""
    script = _RECORDED.replace("{place}", str(tmp_path / "meet"))
    said = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, SIZE: "8"}, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "Collective(operation='all_reduce', number=3, active=False, group='0:default_pg')"


def test_torch_computes_attention_from_a_logarithm_that_it_is_handed() -> None:
    """Attention with sinks hands flash attention's backward pass another result and another logarithm of the sums."""
    forward, backward = (
        {argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments}
        for name in ("_flash_attention_forward", "_flash_attention_backward")
    )
    shared = {"cum_seq_q", "cum_seq_k", "max_q", "max_k", "is_causal", "scale", "window_size_left", "window_size_right"}
    assert shared <= forward
    assert shared | {"out", "logsumexp", "rng_state", "unused"} <= backward
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    aten = torch.ops.aten
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    given = torch.randn_like(out), q, k, v
    plain = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, out, sums, 0.0, True)
    handed = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, out / 2, sums + 0.7, 0.0, True)
    assert not torch.allclose(plain[0], handed[0])


def test_transformers_makes_eager_masks_and_calls_attention_with_the_sinks() -> None:
    from transformers.masking_utils import eager_mask
    from transformers.models.gpt_oss import modeling_gpt_oss as module

    wanted = {
        "batch_size",
        "q_length",
        "kv_length",
        "q_offset",
        "kv_offset",
        "mask_function",
        "attention_mask",
        "dtype",
    }
    assert wanted <= inspect.signature(eager_mask).parameters.keys()
    assert "s_aux=self.sinks" in inspect.getsource(module.GptOssAttention.forward)
    assert {"module", "query", "key", "value", "attention_mask", "scaling"} <= inspect.signature(
        module.eager_attention_forward
    ).parameters.keys()


def test_vision_towers_call_attention_for_each_region_with_what_they_were_given_beside() -> None:
    from engine.features.vision_attention import SERVED

    modules = ("glm4v", "glm4v_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
    found = {
        name: getattr(each, name)
        for folder in modules
        for each in [importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")]
        for name in SERVED
        if hasattr(each, name)
    }
    assert set(found) == SERVED
    for kind in found.values():
        source = " ".join(inspect.getsource(kind.forward).split())
        # The bounds are cut at on the host, one call is made for each, and words of the caller reach the attention.
        assert "lengths = cu_seqlens[1:] - cu_seqlens[:-1]" in source
        assert "torch.split(tensor, lengths.tolist(), dim=2)" in source
        assert "is_causal=False, **kwargs, )[0] for q, k, v in zip(*splits)" in source
        assert "get_interface( self.config._attn_implementation" in source


def test_transformers_tells_where_a_name_of_the_files_belongs():
    """Layers that are packed in files are put where their plain weights would be (`engine.models.stored_packed`)."""
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=1, num_experts=2))
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]

    def place(name):
        return rename_source_key(name, renamings, converters, model.base_model_prefix, model.state_dict())

    assert place("layers.0.self_attn.q_proj.weight") == ("model.layers.0.self_attn.q_proj.weight", None)
    target, known = place("model.layers.0.mlp.experts.1.up_proj.weight")
    assert target == "model.layers.0.mlp.experts.gate_up_proj"
    (converter,) = (each for each in converters if known in each.source_patterns)
    assert [source.rpartition("experts.")[2] for source in converter.source_patterns] == [
        "*.gate_proj.weight",
        "*.up_proj.weight",
    ]
    assert [type(each).__name__ for each in converter.operations] == ["MergeModulelist", "Concatenate"]
    # What is filled in afterwards is named to neither user nor log.
    assert isinstance(model._keys_to_ignore_on_load_unexpected, set)


def test_peft_takes_layers_of_mixtures_for_experts_by_these_tables():
    from peft.utils import transformers_weight_conversion as theirs

    assert theirs._MODEL_TO_CONVERSION_PATTERN["deepseek_v3"] == "qwen2_moe"
    assert set(theirs._MOE_TARGET_MODULE_MAPPING["qwen2_moe"]) == {"gate", "gate_proj", "up_proj", "down_proj"}
    assert "qwen2_moe" in theirs._MOE_FUSED_TARGETS


def test_peft_refuses_an_adapter_beside_the_same_layer_of_mamba():
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    from engine.facts.stored_linears import MAMBA

    for kind in MAMBA:
        model = torch.nn.Module()
        model.config = SimpleNamespace(model_type=kind)
        with pytest.raises(ValueError, match="incompatible"):
            _check_lora_target_modules_mamba(LoraConfig(), model, "out_proj")
