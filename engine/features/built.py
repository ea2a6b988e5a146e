"""What a trainer hands to the features: its models by their part in the training, and where a feature reports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel, TrainerState, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.config.facts import Facts
from engine.features.applied import Applied
from engine.hardware import Gpu, Machine

ReferenceBy = Literal["none", "copy", "adapter_off", "precomputed"]
"""Where the log-probabilities of a reference come from."""


class Events(Protocol):
    """Where the events of a run go."""

    def write(self, kind: str, **payload: Any) -> Any:
        """Appends one event of this kind."""


class Training(Protocol):
    """What features ask of a trainer."""

    model: PreTrainedModel | PeftModel
    args: TrainingArguments
    accelerator: Any
    state: TrainerState
    ranks: Any
    """What this process does by itself; its `waits.span` is around what is waiting for others."""

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of one batch, its gradients added."""

    def compute_loss_context_manager(self) -> contextlib.ExitStack[bool | None]:
        """What a loss is computed in: autocast where it is on."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """A line of curves."""

    def logs_late(self) -> bool:
        """Whether a step's line may be written within the next step."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The curves of the held-out rows."""

    def average_weights(self) -> None:
        """Gives the model the weights that are meant for use."""


@dataclass(frozen=True)
class Notes:
    """What the run knows beside its models: its folder, and by path the reason of each setting that was `auto`."""

    folder: Path = Path()
    reasons: Mapping[str, str] = field(default_factory=dict)
    check_stop: Callable[[], None] = lambda: None
    """Called in between by what takes long; raises Cancelled where the run is to stop."""


@dataclass(frozen=True)
class Built:
    """A trainer and its models, before the first step. `trainer` is None while there is only the policy."""

    policy: torch.nn.Module
    trainer: Training | None = None
    reference: torch.nn.Module | None = None
    """A copy of the model that the policy is held to; None where there is none, or it is the policy without its adapter."""
    reference_by: ReferenceBy = "none"
    """Where the reference's log-probabilities come from."""
    shares_prompts: bool = False
    """Whether the answers to a prompt reuse its keys and values, so that a step is two passes of the model."""
    events: Events | None = None
    """None on all ranks but the first."""
    notes: Notes = field(default_factory=Notes)
    prepared: Mapping[str, Any] = field(default_factory=dict)
    """What a feature's `prepare` left for its `apply`, by the feature's name."""

    def models(self) -> Iterator[torch.nn.Module]:
        """The models that features act on, with their adapters: the policy, then the reference."""
        yield self.policy
        if self.reference is not None and self.reference is not self.policy:
            yield self.reference

    def modules(self) -> Iterator[torch.nn.Module]:
        """Every module of these models, once."""
        yield from {id(module): module for model in self.models() for module in model.modules()}.values()

    def pretrained(self) -> list[PreTrainedModel]:
        """The models of transformers among them, behind adapters, parts that are models themselves included."""
        return [module for module in self.modules() if isinstance(module, PreTrainedModel)]

    def decoder_layers(self) -> list[torch.nn.Module]:
        """The outermost repeated layers of every model."""
        found = {id(layer): layer for model in self.models() for layer in decoder_layers(model)}
        return list(found.values())

    @property
    def training(self) -> Training:
        """The trainer, which there is when a feature's `apply` is called."""
        assert self.trainer is not None
        return self.trainer

    @property
    def device(self) -> torch.device | None:
        """Where the trainer trains; None before there is one."""
        return None if self.trainer is None else self.trainer.args.device

    def alone(self, model: torch.nn.Module) -> Built:
        """One of the models as if there were no other."""
        return replace(self, policy=model, reference=None)

    def report(self, applied: Applied) -> None:
        """Writes a row of the receipt that became known, or another one, after the first step."""
        if self.events is not None:
            self.events.write("receipt", entries=[applied.entry()])

    def warn(self, path: str, message: str) -> None:
        """Writes a warning about a setting."""
        if self.events is not None:
            self.events.write("finding", path=path, severity="warning", rule="at launch", message=message)


def cards_here(device: torch.device | None = None) -> Facts:
    """What rules about the machine ask, of the device that this process trains on: whether it is a card, and which."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return Facts(machine=Machine())
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return Facts(machine=Machine(gpus=(Gpu(name, 0, capability),)))


def base_model(model: torch.nn.Module) -> PreTrainedModel:
    """The model of transformers behind PEFT's wrapper, or the model itself."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def decoder_layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost repeated layers of a model."""
    if isinstance(module, GradientCheckpointingLayer):
        yield module
        return
    for child in module.children():
        yield from decoder_layers(child)
