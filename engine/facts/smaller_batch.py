"""A smaller batch whose step takes the same rows. Imports nothing, since what watches a run proposes it too."""

from __future__ import annotations


def smaller_batch(batch: int, accumulation: int) -> tuple[int, int]:
    """A batch of about half as many rows, of which a step gathers more, so that it still takes `batch * accumulation` rows."""
    rows = batch * accumulation
    fewer = min((each for each in range(1, batch) if rows % each == 0), key=lambda each: abs(2 * each - batch))
    return fewer, rows // fewer
