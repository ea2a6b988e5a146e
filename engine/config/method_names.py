"""What each method is called in a sentence, for lists of runs that need nothing else of it."""

CALLED = {
    "distill": "distillation",
    "embedding": "an embedding model",
    "sft": "SFT",
    "pretrain": "pretraining",
    "dpo": "DPO",
    "kto": "KTO",
    "ipo": "IPO",
    "simpo": "SimPO",
    "orpo": "ORPO",
    "reward": "a reward model",
    "prm": "a process reward model",
    "grpo": "GRPO",
    "gdpo": "GDPO",
    "ppo": "PPO",
}
"""By its `kind`."""
