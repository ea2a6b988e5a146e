"""The kernels section: faster implementations of the same mathematics."""

from typing import Annotated, Any, Literal

from engine.config.section import Auto, Control, Expert, Ge, Le, Section, Source, Title, Unit

COMPILE_OPTIONS = (
    "coordinate_descent_tuning", "coordinate_descent_check_all_directions", "shape_padding", "epilogue_fusion",
    "max_autotune_gemm", "fx_graph_cache", "assume_aligned_inputs", "comprehensive_padding", "decompose_mem_bound_mm",
    "triton.cudagraphs",
)  # fmt: skip
"""The keys of torch._inductor.config that `torch_compile_options` may carry."""
STACK_GRAPH = "stack_cudagraph"
"""The one key beside them, which torch's compiler does not see: all layers recorded as one CUDA graph each way."""
NORM_ROPE_MODELS = (
    "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text", "gemma3_text",
    "gemma4_text", "gemma4_unified_text",
)  # fmt: skip
"""Model types whose attention norms and rotates queries and keys as the fused kernel does."""
ROPE_MODELS = (
    "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2", "qwen2_moe", "llama", "mistral", "mixtral",
    "gemma", "gemma2", "granite",
)  # fmt: skip
"""Model types whose attention rotates queries and keys without a norm of its own. Files of Qwen2-VL and Qwen2.5-VL may name
no type of their text."""
LIGER_PARTS = ("rms_norm", "rope", "swiglu", "geglu")
"""The keys that `liger_kernel_config` may carry, by the names that transformers gives them."""


class Kernels(Section):
    """Faster kernels; `auto` takes what this version has and the machine can run."""

    use_cut_ce: Annotated[bool | Auto, Title("Cut cross-entropy"), Expert, Source("arXiv:2411.09009")] = "auto"
    """Compute log-probabilities from the hidden states in blocks that stay small, with the gradient formed beside them
    where the head is frozen, and leave out the tokens that are not trained. Same numbers, less memory and time than the
    trainer's own blocks. Methods without a vocabulary head have nothing to save. `auto` takes it in 16 bits on cards on which
    it was measured to be the faster one (H100, H200), on others where it saves 3 % of the memory."""

    cut_ce_workspace: Annotated[
        Annotated[int, Ge(32), Le(1_048_576)] | Auto | None, Title("Scores held at once"), Unit("MiB"), Expert
    ] = "auto"
    """Memory in which `use_cut_ce` forms the scores of a batch. Those of a trained head that fit are kept for the backward
    pass, others are computed again; a frozen head takes its tokens in larger parts. Sums round otherwise with another size.
    Empty: 320 MiB on a GPU, of which less is taken where the card is nearly full, and 16 on a CPU. `auto` takes that, and for a
    trained head on an H100 or H200 all scores of a batch, half or a quarter of them, 4 GiB at most, where by the
    estimate they fill the card to no more than 85 % beside what is kept of layers. A run keeps what it began with as long as
    that fits."""

    fused_attn_kernel: Annotated[bool | Auto, Title("Fused norm and rotary"), Expert] = "auto"
    """Compute normalisation and rotary embedding of queries and keys in one kernel, on a GPU, for Qwen3, Qwen3-VL, Qwen3.5,
    their mixtures of experts, Gemma 3 and Gemma 4. Where attention has no such norms the kernel does the rotation alone:
    Qwen2-VL, Qwen2.5-VL, Qwen2, Llama, Mistral, Mixtral, Gemma, Gemma 2 and Granite; compiled layers make it by
    themselves. `auto` leaves it off."""

    fused_lora: Annotated[bool | Auto, Title("Fused LoRA"), Expert, Source("arXiv:2106.09685")] = "auto"
    """Compute LoRA's projections and the gated feed-forward blocks of the decoder layers with a backward pass of their own:
    queries, keys and values together, and of a block only the results of gate and up are kept. Same numbers as PEFT, less
    memory, and a checkpointed layer does not compute its last product twice. What is no plain LoRA stays with PEFT, which
    the receipt counts. Not with compiled layers, which take adapters together themselves. `auto` leaves it off unless
    `kernel_auto_compose` finds it faster."""

    fused_experts: Annotated[
        bool | Auto, Title("Fused experts"), Expert, Source("arXiv:2403.08245, arXiv:2106.09685")
    ] = "auto"
    """In a mixture of experts, sort tokens by expert, project, gate, weight and add up in one block of kernels on a GPU, with
    the adapters of `adapter.target_parameters` inside the products: PEFT adds them to the weights of all experts at every
    pass. Same numbers, less memory and time. `auto` takes it from the H100 on where experts in bfloat16 have adapters and the
    run has one device, and elsewhere leaves it off unless `kernel_auto_compose` finds it faster."""

    use_liger_kernel: Annotated[bool | Auto, Title("Liger kernels"), Expert, Source("arXiv:2410.10989")] = "auto"
    """Compute norms, rotary embeddings and the gates of feed-forward blocks by Liger's Triton kernels, on a GPU, where the
    package liger-kernel is installed. Only this run's own layers are changed, each of which is first held to its class in
    outputs and gradients. What another kernel of this section computes is left to it, as compiled layers are. Liger's loss is
    not taken: where it was measured it took 1.0 to 4.5 times as long as `use_cut_ce`. `auto` leaves it off unless `kernel_auto_compose` finds it more
    than 3 % faster than the best without."""

    liger_kernel_config: Annotated[dict[str, Any], Title("Parts by Liger"), Control("mapping"), Expert] = {}
    """Which parts `use_liger_kernel` computes: `rms_norm`, `rope`, `swiglu` and `geglu`, each true or false. What is not named
    is true; `kernel_auto_compose` takes of these the parts that are faster."""

    kernel_auto_compose: Annotated[bool, Title("Choose kernels by timing"), Expert] = False
    """Before the first step, time the combinations of those of `use_cut_ce`, `fused_attn_kernel`, `fused_lora`,
    `fused_experts`, `use_liger_kernel` and `torch_compile` that are `auto`, on this model and machine, and take the fastest.
    Passes with and without gradients over at most 32 rows of 512 tokens, at most 50 a combination; nothing is trained by them.
    Takes seconds, and beside that what compiling takes: a minute or more on a CPU. The receipt holds the table, and a resumed
    run keeps the choice. On a GPU the kernels taken have their tile sizes timed too, once for each card."""

    quantization_aware: Annotated[
        bool | Literal["fp8"],
        Title("Quantization-aware"),
        Expert,
        Source("torchao; arXiv:1712.05877, arXiv:2209.05433"),
    ] = False
    """Compute the linear layers with fewer bits. `true` rounds weights and inputs to int8 on the way, as they will be after a
    later quantization, and learns around it; nothing gets faster. `fp8` multiplies in 8-bit floating point for speed, on
    cards from the H100 on. Needs torchao. Heads, routers and adapters stay as they are, and so do saved weights."""

    fp8_recipe_name: Annotated[Literal["tensorwise", "rowwise"], Title("FP8 scales"), Expert, Source("torchao")] = (
        "tensorwise"
    )
    """What shares a scale in FP8 products: a whole tensor, which is the fastest, or a row, which holds outliers better."""

    torch_compile: Annotated[bool | Auto, Title("Compile"), Expert, Source("torch.compile")] = "auto"
    """Let torch compile each decoder layer. The first batch waits for it, seconds on a GPU and a minute or more on a CPU; all
    others are computed faster. Checkpoints are made inside, and LoRA's products of one input are taken together. `auto`
    compiles where there are options for it, and on a GPU where the run has 60 steps or more of packed rows, or 150 batches
    of padded ones, which are compiled for any length at once, or so many as the wait that was measured on this machine
    needs; unless another setting breaks the layers' graphs. Should compiling fail, the run goes on without. The receipt says
    why. On a CPU `auto` leaves it off, and with fsdp2 where weights are in few bits, in main memory or of experts."""

    torch_compile_options: Annotated[dict[str, Any], Title("Compile options"), Control("mapping"), Expert] = {}
    """Settings of torch's compiler, each true or false, by their names in `torch._inductor.config`. They are in force while
    the layers are compiled and nowhere else. `stack_cudagraph` records all layers of a model as one CUDA graph forward
    and one backward, which are played for batches of the shape that was recorded: for small models whose steps wait for the
    host. Activations keep their memory between steps then, and gradients lie beside them."""
