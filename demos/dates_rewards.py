"""A reward as a Python function: how much of a date is right. Named in grpo_dates.yaml as dates_rewards.py:parts."""


def parts(completions, answer, **columns):
    """One number for each answer: the share of year, month and day that are those of the row's answer."""
    scores = []
    for messages, wanted in zip(completions, answer, strict=True):
        said, right = messages[-1]["content"].strip().split("-"), wanted.split("-")
        scores.append(sum(a == b for a, b in zip(said, right, strict=True)) / 3 if len(said) == 3 else 0.0)
    return scores
