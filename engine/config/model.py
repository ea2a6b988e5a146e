"""The model section: which model, its tokenizer and template, and how its weights are held."""

from typing import Annotated, Any, Literal

from engine.config.section import Advanced, Control, Expert, Required, Section, Source, Title, Words

Dtype = Literal["bfloat16", "float16", "float32"]
Quantization = Literal["none", "fp8", "nf4", "fp4", "int8", "mxfp4", "nvfp4"]
Attention = Literal[
    "auto",
    "sdpa",
    "eager",
    "varlen",
    "sinks",
    "cudnn",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
    "xformers",
]  # fmt: skip


class Model(Section):
    """The model that is trained."""

    name: Annotated[str, Title("Model"), Control("path"), Required()] = ""
    """Which model to train: a hub id such as `Qwen/Qwen3-0.6B`, a local folder, or a small model that trains
    on a CPU without any network: `builtin/tiny` for text, `builtin/tiny-vl` for text and images."""

    revision: Annotated[str | None, Expert] = None
    """Branch, tag or commit of the hub model. Empty means its main branch; a commit makes the run repeatable."""

    tokenizer: Annotated[str | None, Control("path"), Advanced] = None
    """Another tokenizer than the model's own: a hub id or a folder. Empty means the model's own. `builtin/tiny` is then
    built with that vocabulary, untrained."""

    chat_template: Annotated[str | None, Control("path"), Advanced] = None
    """How messages become text: a template's name or a Jinja file. Empty means the tokenizer's own template, which is
    right for a chat model."""

    chat_template_kwargs: Annotated[dict[str, Any], Expert] = {}
    """Extra values for the chat template, such as `enable_thinking: false`."""

    train_vision: Annotated[
        Literal["none", "projector", "all"],
        Title("Vision parts"),
        Words(
            none="frozen, the language model learns",
            projector="the projector learns, the vision tower is frozen",
            all="the vision tower and the projector learn too",
        ),
        Advanced,
    ] = "all"
    """Which parts of a model that sees learn beside its language model: none of those that see, the projector from images to
    tokens, or the vision tower too. With a LoRA adapter it says beside which layers adapters are put; without one which
    weights are trained."""

    dtype: Annotated[
        Dtype,
        Title("Precision"),
        Words(
            bfloat16="bfloat16, the usual choice",
            float16="float16, for older GPUs",
            float32="float32, twice the memory",
        ),
        Source("transformers: dtype"),
    ] = "bfloat16"
    """The number format of the weights and of the computation. bfloat16 halves the memory of float32 and trains as
    well on every card since 2020; float32 is the exact choice for small models and CPUs."""

    quantization: Annotated[
        Quantization,
        Words(
            none="none",
            fp8="fp8, 8 bits, computed as they are",
            nf4="nf4, 4 bits (QLoRA)",
            fp4="fp4, 4 bits",
            int8="int8, 8 bits",
            mxfp4="mxfp4, experts alone in 4 bits",
            nvfp4="nvfp4, experts alone in 4.5 bits",
        ),
        Source("arXiv:2305.14314"),
    ] = "none"
    """Hold the frozen base weights in fewer bits, so that a larger model fits the card. Needs a LoRA adapter, since
    the small numbers themselves cannot be trained. `fp8` multiplies in 8 bits too, forward and for input gradients, on
    cards of compute capability 8.9 and above; small layers, routers and heads stay as they are. The others widen the
    weights again for each product. `mxfp4` holds the experts of a mixture as gpt-oss is published, a power of two for each
    32 numbers along what goes in, and leaves all other layers in `dtype`; `nvfp4` has a finer scale for each 16, which loses
    less. Files in MXFP4, FP8, GPTQ, AWQ or compressed-tensors need no setting: under a LoRA adapter they stay as stored."""

    quantize_moe_experts: Annotated[bool, Title("Quantize experts"), Advanced] = True
    """Hold the experts of a mixture in the bits of `quantization` too, which most of its weights are. Each expert is packed
    as it is read, so that loading needs room for one in full; those that files hold in MXFP4 or FP8 are taken as they are. A pass of
    its own unpacks those that tokens were sent to, a few at a time, and again for gradients. Off leaves experts in the format
    of `dtype`, in several times the memory."""

    attention: Annotated[Attention, Advanced, Source("transformers: attn_implementation")] = "auto"
    """Which implementation computes attention. `auto` takes torch's own fused attention, which needs no package; where packed
    rows are kept apart on a card, the flash attention that is installed and serves the card and the width of the heads (on
    Hopper `cudnn` too, by the package nvidia-cudnn-frontend), else `varlen`, the one over documents that torch carries. Layers that
    may be compiled are left `cudnn` and `varlen`, which compiled layers serve. Of several that fit, a run on one card measures
    attention alone over packs like its own at its start, a second or two, and takes another than the first where it is more than
    3 % faster; later launches know the times. gpt-oss,
    whose heads have a sink, gets `sinks` on a card in 16 bits: torch's flash attention with the sink in its sums. `xformers`, by
    the package of that name, does so on cards that are older. `flex_attention` needs no mask either, serves float32 and wide
    heads too, and is compiled at the first batch. `sdpa` and `eager` keep packed rows apart by a mask of all pairs of tokens.
    What a model or a card turns out not to take is replaced by torch's own, and the receipt says why."""
