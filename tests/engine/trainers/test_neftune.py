"""Noise on embeddings: in training alone, within its bound, drawn again on resuming as it would have been."""

from __future__ import annotations

import math

from torch.nn import Embedding
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from

ALPHA = 5.0


def test_noise_is_within_its_bound_in_training_and_none_where_rows_are_held_out(train, source):
    plain, seen = [], []

    def embedded(module, args, output):
        if isinstance(module, Embedding):
            plain.append(output.detach().clone())

    def first_layer(module, args):
        if type(module).__name__ == "Qwen3DecoderLayer" and module.self_attn.layer_idx == 0:
            seen.append((module.training, args[0].detach() - plain[-1]))

    hooks = [register_module_forward_hook(embedded), register_module_forward_pre_hook(first_layer)]
    try:
        held_out = {"data.eval": [{"path": source(CONVERSATIONS[:4])}], "run.eval_steps": 2}
        data = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 2, **held_out}
        run = train({**data, "optim.neftune_noise_alpha": ALPHA, "memory.gradient_checkpointing": False})
    finally:
        for hook in hooks:
            hook.remove()
    training, looking = ([noise for trained, noise in seen if trained is wanted] for wanted in (True, False))
    assert len(training) == 4
    assert looking
    assert not any(noise.any() for noise in looking)
    for noise in training:
        bound = ALPHA / math.sqrt(noise.shape[1] * noise.shape[2])
        assert 0.95 * bound < noise.abs().max().item() <= 1.001 * bound
        assert abs(noise.mean().item()) < 0.1 * bound
    (told,) = (each for each in lines(run, "receipt")[0]["entries"] if each["feature"] == "noise on embeddings")
    assert told["effective"] == ALPHA


def test_a_resumed_run_draws_the_noise_that_it_would_have_drawn(train, source, tmp_path):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 3, "run.save_steps": 1}
    whole = train({**settings, "optim.neftune_noise_alpha": ALPHA})
    again = train(folder=resumed_from(whole, 1, tmp_path / "again"))
    ends = [(run.checkpoints / "checkpoint-3" / "model.safetensors").read_bytes() for run in (whole, again)]
    assert ends[0] == ends[1]
    silent = train(settings)
    assert (silent.checkpoints / "checkpoint-3" / "model.safetensors").read_bytes() != ends[0]
