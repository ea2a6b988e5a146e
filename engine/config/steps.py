"""The order of questions that both frontends ask, which settings belong to which, and the goals in words."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.tree import FieldSpec, RunConfig, fields, fields_of


@dataclass(frozen=True, slots=True)
class Step:
    """One question of seven."""

    id: str
    title: str
    question: str


STEPS: tuple[Step, ...] = (
    Step("goal", "Goal", "What shall the model learn?"),
    Step("model", "Model", "Which model shall learn it?"),
    Step("data", "Data", "From which rows?"),
    Step("method", "Method", "How, and how fast?"),
    Step("memory", "Memory", "Does it fit, and how fast will it be?"),
    Step("review", "Review", "Is everything as you want it?"),
    Step("launch", "Launch", "Where shall it run?"),
)

_SECTION_STEPS = {
    "model": "model",
    "data": "data",
    "method": "method",
    "adapter": "method",
    "optim": "method",
    "memory": "memory",
    "kernels": "memory",
    "distributed": "memory",
    "run": "launch",
}
# Settings whose question is another step's than their section's.
_ELSEWHERE: dict[FieldSpec, str] = {
    fields.model.dtype: "memory",
    fields.model.quantization: "memory",
    fields.model.quantize_moe_experts: "memory",
    fields.model.attention: "memory",
    fields.optim.per_device_train_batch_size: "memory",
    fields.optim.per_device_eval_batch_size: "memory",
    fields.optim.gradient_accumulation_steps: "memory",
    fields.optim.tf32: "memory",
    fields.run.prompts: "data",
}


def step_of(spec: FieldSpec) -> str:
    """The id of the step that asks for this setting."""
    return _ELSEWHERE.get(spec) or _SECTION_STEPS[spec.section]


def step_fields(step: Step | str, config: RunConfig) -> tuple[FieldSpec, ...]:
    """The settings that this step asks for, in order, for the config's method and adapter."""
    wanted = step if isinstance(step, str) else step.id
    return tuple(spec for spec in fields_of(config) if step_of(spec) == wanted)


def step_of_path(path: str) -> str:
    """The id of the step where a finding at this path is mended; `review` for what belongs to no setting."""
    spec = fields.get(path) or fields.get(".".join(path.split(".")[:2]))
    if spec is None or spec.path not in fields:
        return _SECTION_STEPS.get(path.partition(".")[0], "review")
    return step_of(spec)


@dataclass(frozen=True, slots=True)
class Goal:
    """A wish in words (of at most 36 cells: a line at 80 columns), the recipe that answers it, or why none does yet."""

    id: str
    description: str
    recipe: str | None
    note: str


GOALS: tuple[Goal, ...] = (
    Goal(
        "try",
        "See it work here and now, offline",
        "demo",
        "A tiny model learns dates on the CPU in a few minutes. Nothing is downloaded.",
    ),
    Goal(
        "answer",
        "Teach it to answer like my examples",
        "sft-lora",
        "Supervised fine-tuning with LoRA on your question and answer rows.",
    ),
    Goal(
        "prefer",
        "Prefer some answers over others",
        "dpo",
        "Direct preference optimization on pairs of a better and a worse answer.",
    ),
    Goal("read", "Read more text of my field", "pretrain-text", "Continued pretraining on plain text."),
    Goal(
        "score",
        "Let it try, and reward good answers",
        "grpo",
        "Reinforcement learning (GRPO): its own answers are scored, and the better ones become likelier.",
    ),
    Goal(
        "vectors",
        "Make vectors for search",
        "embedding",
        "An embedding model: texts that belong together come to lie close, learned from pairs or triplets.",
    ),
    Goal(
        "judge",
        "Make a judge that scores answers",
        "reward",
        "A reward model: a score for an answer, learned from pairs.",
    ),
)
