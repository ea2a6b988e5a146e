"""A step of the recipes of mixtures, as they stand: speed and memory that their first lines may say.

    python benchmarks/mixture_recipes.py [RECIPE ...] [--arms ours "packed rows, compiled"] [--layers N] [--seconds 60]
                                         [--rounds 3] [--window 1] [--results FILE --commit HASH]
    python benchmarks/mixture_recipes.py --tiny --tokens 64 --rounds 1 --arms ours --check

The recipe's own settings, `auto` resolved for this card, over the published shape with random weights drawn on the device,
packed there one expert at a time where the recipe quantizes. What is set otherwise: the rows (4 of 2,048 tokens, none
padded), one batch a step in place of the recipe's accumulation, how long the run is, and no checkpoints. Of a model that also
sees, the language model alone. `ours` is the recipe, whose layers are not compiled as its rows are not packed; `packed rows,
compiled` is the recipe with both. Each arm has the card for itself; loss and gradient norm of the first step are told. `--layers`
takes fewer of them, and the rows say so. `--tiny` takes a small model of each family in float32 on any device, which shows that
all of it runs, and no figure of interest.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from _arms import ARMS, Builder
from _figures import Results, result_options
from _turns import CARD
from gpu_methods import compare, say

from engine.config.recipes import recipe_mapping
from engine.data.gather_facts import gather_facts
from engine.planning.auto import resolved
from engine.rules import read

RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", "OlmoeForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50_304,
    }),
    "mixtral": ("Mixtral", "MixtralForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_local_experts": 8, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000,
        "sliding_window": None,
    }),
    "qwen3.5-35b-a3b": ("Qwen3_5MoeText", "Qwen3_5MoeForCausalLM", {
        "hidden_size": 2048, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "vocab_size": 248_320, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    }),
    "moonlight-16b-a3b": ("DeepseekV3", "DeepseekV3ForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 11_264, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 163_840,
    }),
}  # fmt: skip
"""Of each recipe transformers' config and class, and the published shape."""
TINY: dict[str, dict[str, Any]] = {
    "olmoe": {
        "hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4,
    },
    "mixtral": {
        "hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "qwen3.5-35b-a3b": {
        "hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "moonlight-16b-a3b": {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
}  # fmt: skip
"""What is smaller in a model for a CPU."""
ARMS_HERE = ["ours", "packed rows, compiled"]


class RecipeBuilder(Builder):
    """The arms of one recipe: its own settings, and its base packed as it says."""

    def model_config(self) -> Any:
        family, architecture, size = RECIPES[self.options.recipe]
        small = {**TINY[self.options.recipe], "vocab_size": 512} if self.options.tiny else {}
        layers = {"num_hidden_layers": self.options.layers} if self.options.layers else {}
        shape = getattr(transformers, f"{family}Config")(
            **{**size, **small, **layers}, tie_word_embeddings=False, pad_token_id=0, attention_dropout=0.0
        )
        shape.architectures = [architecture]
        return shape

    def packed(self, name: str) -> str:
        return str(recipe_mapping(self.options.recipe)["model"].get("quantization", ""))

    def config(self, name: str) -> Any:
        """The recipe's settings over this folder and these rows."""
        mapping = recipe_mapping(self.options.recipe)
        mapping["model"] |= {"name": str(self.folder), "dtype": "float32" if self.options.tiny else "bfloat16"}
        mapping["data"] |= {"train": [{"path": "builtin/dates"}], "max_length": self.options.tokens}
        mapping["optim"] |= {
            "per_device_train_batch_size": self.options.rows, "gradient_accumulation_steps": 1, "max_steps": 100_000,
        }  # fmt: skip
        mapping["run"] = {"save_steps": 1_000_000}
        for path, value in ARMS[name].items():
            section, setting = path.split(".")
            mapping.setdefault(section, {})[setting] = value
        reading = read(mapping)
        if wrong := [found.message for found in reading.findings if found.severity == "error"]:
            raise SystemExit(f"{self.options.recipe}: {wrong}")
        return resolved(reading.config, gather_facts(reading.config, sources=False))


class Figures(Results):
    """The rows of one recipe, each said in tokens a second and GiB."""

    def __init__(self, given: argparse.Namespace, device: str, name: str) -> None:
        super().__init__(given, device, "torch", "triton")
        fewer = f", {given.layers} of {RECIPES[name][2]['num_hidden_layers']} layers" if given.layers else ""
        self.name, self.tokens = f"recipe {name}{', tiny' if given.tiny else fewer}", given.rows * given.tokens

    def under(self, work: str, shape: str, impl: str, ms: Sequence[float], peak_mib: float | None) -> tuple[str, str]:
        """Under our name of the work, whatever the arms' script has."""
        speed, gib = self.tokens / statistics.median(ms) * 1e3, (peak_mib or 0) / 1024
        say(f"{self.name} {impl}: {speed:,.0f} tokens/s in {gib:.2f} GiB")
        return self.name, shape


def run(name: str, given: argparse.Namespace, device: str) -> bool:
    """The arms of one recipe, one after the other; whether all ran."""
    begun, sound = time.perf_counter(), True
    figures = Figures(given, device, name)
    for number, arm in enumerate(given.arms, 1):
        options = argparse.Namespace(
            **{**vars(given), "arms": [arm]}, recipe=name, shape="tiny" if given.tiny else name, full=False, ragged=False,
            profile=None,
        )  # fmt: skip
        until = begun + given.seconds * number / len(given.arms)
        sound = compare(options, "sft", [arm], until, figures, RecipeBuilder) and sound
        gc.collect()
        if CARD:
            say(f"{name}: {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB reserved")
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return sound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)}; all where none is named"
    )
    parser.add_argument("--arms", nargs="*", default=ARMS_HERE, choices=ARMS_HERE)
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the model has")
    parser.add_argument("--tiny", action="store_true", help="a small model of each family in float32")
    parser.add_argument("--rows", type=int, default=4, help="sequences a step")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each arm at most")
    parser.add_argument("--window", type=int, default=1, help="steps of an arm's turn")
    parser.add_argument("--seconds", type=float, default=60, help="of each recipe; no round is begun later than this")
    parser.add_argument("--peak", choices=ARMS_HERE, help="what is on the card at the peak of this arm's first steps")
    parser.add_argument("--check", action="store_true", help="exit 1 where an arm fell")
    result_options(parser)
    given = parser.parse_args()
    if unknown := set(given.recipes) - set(RECIPES):
        parser.error(f"no recipe is named {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    device = torch.cuda.get_device_name() if CARD else "cpu"
    say(json.dumps({"device": device, "torch": torch.__version__, "transformers": transformers.__version__}))
    sound = [run(name, given, device) for name in given.recipes or RECIPES]
    return int(given.check and not all(sound))


if __name__ == "__main__":
    sys.exit(main())
