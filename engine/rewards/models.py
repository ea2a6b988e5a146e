"""Reward models: a sequence classifier with one output reads the prompt with its answer and gives a number.

It reads the conversation by its own tokenizer's chat template, or the plain texts where it has none. A checkpoint without
a trained scoring head is refused: its numbers would be random. An adapter that method.kind reward trained is one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import model_files
from engine.config.reward_specs import SEES_NOT, RewardSpec
from engine.data.chat import Chat
from engine.data.plan import own_template
from engine.errors import ModelError, WorkbenchError, first_line, redact, visible
from engine.hub import commit_of, reaching_hub, snapshot
from engine.models.capped_scores import keep_capped_scores

BATCH = 16
_OTHER = "Name another reward model."


class RewardModel:
    """One loaded reward model on its device."""

    def __init__(self, spec: RewardSpec, device: torch.device) -> None:
        """Raises ModelError when it cannot be loaded or has no scoring head."""
        from transformers import AutoTokenizer

        name = self.name = visible(redact(spec.argument))
        try:
            with reaching_hub(spec.argument):
                revision = commit_of(spec.argument)
                model_files.refuse_without_tokens(model_files.checked(spec.argument, revision))
                self.tokenizer = AutoTokenizer.from_pretrained(
                    spec.argument, revision=revision, trust_remote_code=False
                )
                self.model, has_head = _loaded(spec.argument, revision)
        except ModelError as problem:
            sentence = problem.message.removeprefix("model.name: ")
            raise ModelError(f"method.reward_funcs: the reward model {name}: {sentence}", problem.hint) from problem
        except model_files.UNREADABLE as problem:
            reason = visible(redact(first_line(problem)))
            raise ModelError(
                f"method.reward_funcs: the reward model {name} cannot be loaded: {reason.rstrip('.')}.",
                "Name a folder or a hub id of a model with a scoring head, such as one that method.kind reward trains; "
                "without a network only what was fetched before can be loaded.",
            ) from None
        if not has_head:
            raise ModelError(
                f"method.reward_funcs: {name} has no head that gives one score, so its rewards would be random.",
                "Name a reward model: one trained with method.kind reward, or a published one.",
            )
        template, _ = own_template(self.tokenizer)
        flaw = f"method.reward_funcs: the chat template of the reward model {name}"
        # A child of its own renders it, with limits: a stranger's template as much as the policy's.
        self.chat = Chat(self.tokenizer, template, flaw, way_out=_OTHER) if template else None
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.tokenizer.padding_side = "right"
        self.model.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def score(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """One number for each answer, in float32."""
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        plain = self.chat is None
        scores: list[float] = []
        for start in range(0, len(texts), BATCH):
            inputs = self.tokenizer(
                texts[start : start + BATCH], return_tensors="pt", padding=True, add_special_tokens=plain
            ).to(self.model.device)
            inputs.pop("token_type_ids", None)
            scores += self.model(**inputs).logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + (completion if isinstance(completion, str) else completion[-1]["content"])
        if any(not isinstance(turn["content"], str) for turn in prompt):
            raise WorkbenchError(
                f"method.reward_funcs: the reward model {self.name} reads text, and the prompt has images.", SEES_NOT
            )
        messages = [*prompt, *completion] if not isinstance(completion, str) else [*prompt, _turn(completion)]
        if self.chat is not None:
            return self.chat.render(messages)
        return "\n\n".join(str(message["content"]) for message in messages)


def _loaded(name: str, revision: str | None) -> tuple[Any, bool]:
    """The model, and whether its head of one score was trained; an adapter stands on its base, as it was trained."""
    from peft import PeftConfig, PeftModel
    from peft.utils.save_and_load import load_peft_weights
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(name, revision=revision) is None:
        model_files.complete(name, revision)
        if AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False).num_labels != 1:
            return None, False
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            name,
            dtype="auto",
            output_loading_info=True,
            revision=revision,
            use_safetensors=True,
            trust_remote_code=False,
        )
        keep_capped_scores(model)
        return model, not any(_of_head(key) for key in loading["missing_keys"])
    folder = (
        Path(name)
        if Path(name).is_dir()
        else snapshot(name, revision, (*model_files.SMALL_FILES, model_files.ADAPTER_WEIGHTS))
    )
    model_files.refuse_what_it_names(folder)
    model_files.refuse_pickled_adapter(folder)
    heads = [weight for key, weight in load_peft_weights(str(folder), device="cpu").items() if _of_head(key)]
    if not heads or any(len(weight) != 1 for weight in heads):
        return None, False
    base = str(PeftConfig.from_pretrained(str(folder)).base_model_name_or_path)
    with reaching_hub(base):
        below = commit_of(base)
        model_files.complete(base, below)
        model = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=1, dtype="auto", revision=below, use_safetensors=True, trust_remote_code=False
        )
    keep_capped_scores(model)
    return PeftModel.from_pretrained(model, str(folder)), True


def _of_head(key: str) -> bool:
    return "score" in key or "classif" in key


def _turn(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
