"""Models whose attention caps its scores, as Gemma 2's: torch's fused attention has no form for that.

transformers 5.23 refuses it for them; 5.17 takes it unasked and leaves the cap out without a word, which gives other numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def keep_capped_scores(model: PreTrainedModel) -> bool:
    """Gives a model that caps its scores and was loaded with torch's fused attention the plain one; whether it was one."""
    text = model.config.get_text_config()
    if text._attn_implementation != "sdpa" or not getattr(text, "attn_logit_softcapping", None):
        return False
    model.set_attn_implementation("eager")
    return True
