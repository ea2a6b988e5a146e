"""What a failed run proposes is never what has just failed."""

from __future__ import annotations

from engine.run.proposals import after_divergence, after_out_of_memory, way_on


def test_divergence_proposes_only_what_is_not_in_force():
    hot = {"optim": {"learning_rate": 10, "max_grad_norm": 0}, "model": {"dtype": "float32"}}
    words = after_divergence(hot, "checkpoint-4")
    assert "from 10 to 1" in words
    assert "max_grad_norm: 1.0" in words
    assert "resume from checkpoint-4" in words
    assert "dtype" not in words
    clipped = {"optim": {"learning_rate": 1e-3, "max_grad_norm": 1.0}, "model": {"dtype": "float16"}}
    words = after_divergence(clipped, None)
    assert "max_grad_norm" not in words
    assert "model.dtype: bfloat16" in words
    assert "new run" in words


def test_want_of_memory_proposes_no_batch_below_one_and_no_checkpointing_twice():
    small = {"optim": {"per_device_train_batch_size": 1}, "memory": {"gradient_checkpointing": "full"},
             "data": {"max_length": 4096}, "adapter": {"kind": "lora"}}  # fmt: skip
    words = after_out_of_memory(small)
    assert "batch" not in words
    assert "checkpointing" not in words
    assert "4,096" in words


def test_going_on_as_it_is_is_only_proposed_where_that_can_help():
    assert way_on("signal SIGKILL", "checkpoint-4") == "resume from checkpoint-4"
    assert way_on("diverged", "checkpoint-4").startswith("put right what is named above")
    assert way_on("error", None).endswith("start again from the beginning")
