"""Rows padded behind their tokens are computed without a mask of all pairs, in every run whose collator pads so."""

from __future__ import annotations

SETTING = None
AFTER = ()
