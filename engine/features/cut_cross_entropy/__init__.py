"""Bytes of the vocabulary head at the peak of a batch, for each way in which the scores of tokens are computed here.

Scores are formed in tiles, all at once only where `cut` has room for them, and what counts is the tile, the hidden states
gathered for it, and the buffers of gradients. `fused` is what TRL 1.16 does in every method with a vocabulary head, `cut` is
`kernels.use_cut_ce`; methods without a head take nothing. A test holds the sizes of tiles to those of the installed code,
another the bytes to what the code takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.method import CrossEntropy
from engine.config.rule import Refused, one_of, refused, rule, take
from engine.config.tree import FieldSpec, RunConfig, fields
from engine.facts import counts
from engine.features.feature import TIMED
from engine.hardware import Gpu
from engine.kernels.requirements import CAPABILITY, CPU_WORKSPACE, CUDA_WORKSPACE, FEWEST_ROWS, MiB, layout

SETTING = fields.kernels.use_cut_ce
AFTER = ("auto_compose",)

MEASURED, BEYOND = (9, 0), (10, 0)
"""Compute capabilities of the cards on which it was measured against TRL's blocks: 8,192 tokens and 151,936 words on an H100
take 50 to 57 ms for 61 (hidden 4,096, trained), 31 for 45 (frozen), 17 for 18 and 10 for 14 (hidden 1,024)."""
WORTH = 0.03
"""The share of a card's memory for which it is taken on others."""

MOST = 4096
"""MiB of scores at once that `auto` takes at most: larger products are no faster, and the estimate may err by a tenth."""

Path = Literal["none", "fused", "cut"]
# A tile of TRL's head is so many tokens high and so many words wide, whatever the vocabulary.
TOKEN_CHUNK, VOCABULARY_CHUNK = 4096, 32768
# Without Triton tiles are worked on in plain torch, in float32: TRL makes seven copies and a mask, ours so many copies.
FOLDED, COPIES_BY_ROWS, COPIES_BY_WORDS = 29, 3, 5


def beside_it(config: RunConfig) -> tuple[FieldSpec, ...]:
    """The settings in force that this op alone adds to the cross-entropy: TRL's head gives no more than log-probabilities."""
    adds = (fields.method.label_smoothing, fields.method.z_loss) if isinstance(config.method, CrossEntropy) else ()
    return tuple(spec for spec in adds if spec.value(config))


def chosen(config: RunConfig, facts: Facts) -> tuple[bool | Literal["auto"], str]:
    """What `auto` takes, and why."""
    if added := beside_it(config):
        return True, f"it computes {' and '.join(spec.path for spec in added)}"
    if config.kernels.kernel_auto_compose:
        return "auto", TIMED
    if path_of(config) == "none":
        return False, "this method has no vocabulary head"
    if facts.machine is None:
        return False, "the machine is not known yet; the launch decides"
    if (reason := _not_served(config, facts.machine.gpus)) is not None:
        return False, reason
    names = ", ".join(dict.fromkeys(gpu.name for gpu in facts.machine.gpus))
    if all(MEASURED <= gpu.capability < BEYOND for gpu in facts.machine.gpus):
        return True, f"{names}: faster than the trainer's own blocks and smaller, measured on cards like it"
    room = min(gpu.memory_bytes for gpu in facts.machine.gpus)
    share = _saved(config, facts) / room if room else 0.0  # a card may be described without its memory
    if share >= WORTH:
        return True, f"its speed was not measured on {names}, and it saves {share:.0%} of the card's memory"
    return False, f"the trainer's own blocks serve: true takes smaller ones, whose speed was not measured on {names}"


def _not_served(config: RunConfig, gpus: tuple[Gpu, ...]) -> str | None:
    """Why it is not taken unasked, or None."""
    if not gpus:
        return "there is no GPU"
    if config.distributed.strategy == "fsdp2" or config.distributed.context_parallel_size > 1:
        return "it was not measured where devices share a model or its rows"
    if config.model.dtype == "float32":
        return "it was measured in 16 bits"
    old = next((gpu.name for gpu in gpus if gpu.capability < CAPABILITY), None)
    return None if old is None else f"{old} is older than the cards that its kernel serves"


def _saved(config: RunConfig, facts: Facts) -> float:
    """Bytes that it takes less at the head's peak; 0 while the model is not known."""
    model = counts.known_model(config, facts)
    if model is None or not model.hidden_size or not model.vocab_size:
        return 0.0
    rows = config.optim.per_device_train_batch_size
    head = Head(rows * config.data.max_length, model.hidden_size, model.vocab_size, 2, is_trained(config), on_gpu=True)
    return head_bytes("fused", head) - head_bytes("cut", head)


@rule(reads=(SETTING, fields.method.kind, fields.method.label_smoothing, fields.method.z_loss))
def what_adds_to_the_cross_entropy_needs_the_cut_one(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    added = beside_it(config)
    if added and config.kernels.use_cut_ce is False:
        todo = "TRL's own head gives log-probabilities alone."
        rule_text = f"true or auto with {' and '.join(spec.path for spec in added)}"
        yield must(SETTING.path, rule_text, False, todo, fix=Fix("let it be chosen", unset=(SETTING.path,)))


@dataclass(frozen=True, slots=True)
class Head:
    """One head in one batch: `tokens` that are scored, `size` bytes of a number, `trained` where it is learned too."""

    tokens: int
    hidden: int
    vocabulary: int
    size: float
    trained: bool
    on_gpu: bool
    room: int | None = None
    """Bytes for scores; None for the usual."""

    @property
    def states(self) -> float:
        """The hidden states of all scored tokens, gathered and kept for the backward pass."""
        return self.tokens * self.hidden * self.size

    @property
    def weight(self) -> float:
        """The head's weight, or its gradient in the same numbers."""
        return self.vocabulary * self.hidden * self.size

    def in_float32(self, size: float) -> float:
        """A sum in float32 beside a result of `size` bytes; with float32 numbers they are one."""
        return size * 4 / self.size + size if self.size < 4 else size


def path_of(config: RunConfig) -> Path:
    """Which way this config's scores take."""
    if config.method.head != "vocabulary":
        return "none"
    return "cut" if config.kernels.use_cut_ce is True or beside_it(config) else "fused"


@rule(reads=(SETTING, fields.method.kind))
def cut_cross_entropy_needs_a_vocabulary_head(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.kernels.use_cut_ce is True and path_of(config) == "none":
        todo = "Its model has no vocabulary head, so there is nothing to cut."
        fix = Fix("let it be chosen", unset=(SETTING.path,))
        yield must(SETTING.path, f"false or auto for {config.method.kind}", True, todo, severity="warning", fix=fix)


def room_of(config: RunConfig) -> int | None:
    """Bytes in which scores are formed, None where it is the usual size."""
    asked = config.kernels.cut_ce_workspace
    return None if asked is None or asked == "auto" else asked * MiB


def room_sizes(config: RunConfig, facts: Facts) -> tuple[tuple[int, ...], str]:
    """The sizes in MiB beyond the usual that are worth their memory, the largest first: of a trained head those of all scores
    of a batch, half and a quarter of them. Beside them what they are, or why there are none."""
    if facts.machine is None:
        return (), "the machine is not known yet; the launch decides"
    if not facts.machine.gpus:
        return (), "a CPU wants it near its caches"
    if path_of(config) != "cut":
        return (), f"not used without {SETTING.path}"
    if not is_trained(config):
        return (), "before a frozen head twice the size was no faster on an H100"
    if config.model.dtype == "float32" or not all(MEASURED <= gpu.capability < BEYOND for gpu in facts.machine.gpus):
        names = ", ".join(dict.fromkeys(gpu.name for gpu in facts.machine.gpus))
        return (), f"more was not measured on {names} in {config.model.dtype}"
    model = counts.known_model(config, facts)
    if model is None or not model.vocab_size:
        return (), "the model's vocabulary is not known yet"
    tokens, _ = counts.tokens_and_length(config, facts)
    scores = math.ceil(tokens * model.vocab_size * 2 / MiB)
    sizes = tuple(size for size in (scores, scores // 2, scores // 4) if CUDA_WORKSPACE // MiB < size <= MOST)
    return sizes, f"all scores of {tokens:,} tokens take {scores:,} MiB"


refused(
    __name__,
    Refused(
        "cut-ce-workspace-needs-use-cut-ce",
        fields.kernels.cut_ce_workspace,
        lambda value: isinstance(value, int),
        f"empty or auto while {SETTING.path} is false",
        "It is where that forms its scores.",
        take(SETTING, True, "use it"),
        beside={SETTING: one_of(False)},
    ),
)


def is_trained(config: RunConfig) -> bool:
    """Whether the head's weight gets a gradient."""
    return config.adapter.kind == "none" or "lm_head" in config.adapter.modules_to_save


def head_bytes(path: Path, head: Head) -> float:
    """Bytes at the head's own peak, which is in its backward pass or, for `cut` before a frozen head, before it."""
    return {"none": _none, "fused": _fused, "cut": _cut}[path](head)


def _none(head: Head) -> float:
    return 0.0


def _fused(head: Head) -> float:
    high, wide = min(head.tokens, TOKEN_CHUNK), min(head.vocabulary, VOCABULARY_CHUNK)
    # The buffer has its full width also before a small vocabulary; pages that nobody touches cost nothing on a CPU.
    tile = high * (VOCABULARY_CHUNK if head.on_gpu else wide) * head.size
    folded = 0 if head.on_gpu else FOLDED * high * wide
    sums = head.in_float32(head.states) + (head.in_float32(head.weight) if head.trained else 0.0)
    return tile + folded + head.states + sums


def _cut(head: Head) -> float:
    room = head.room or (CUDA_WORKSPACE if head.on_gpu else CPU_WORKSPACE)
    scores = head.tokens * head.vocabulary * head.size
    if not head.trained:
        by_rows = _worked(head, min(scores, max(room, FEWEST_ROWS * head.vocabulary * head.size)), COPIES_BY_ROWS)
        # Gradients are formed beside the scores and only scaled later, when the tile is gone.
        return head.states + max(by_rows + head.states, 2 * head.states)
    size = int(head.size)
    chosen = layout(head.tokens, head.hidden, head.vocabulary, size, size, room)
    tile = head.tokens * chosen.words * head.size
    held = chosen.kept * tile + (0 if chosen.words == head.vocabulary else tile)
    return head.states + held + _worked(head, tile, COPIES_BY_WORDS) - tile + head.in_float32(head.states) + head.weight


def _worked(head: Head, tile: float, copies: int) -> float:
    """A tile with the float32 copies that plain torch makes of it; 16-bit numbers are copied once more."""
    return tile if head.on_gpu else tile * (1 + 4 * (copies + (head.size < 4)) / head.size)
