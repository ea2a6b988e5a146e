"""Configs of other tools: reading them with a ledger of every key, and writing ours for them. No torch, no network."""
