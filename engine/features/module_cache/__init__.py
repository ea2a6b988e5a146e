"""Module traversals that the libraries take at each step are taken once, in every run."""

from __future__ import annotations

SETTING = None
AFTER = ("layer_offloading",)
"""The lists are made of the modules as they stand at the end."""
