"""What the hub's cache offers: of the kind that is asked for, what was used last first."""

from __future__ import annotations

from types import SimpleNamespace

import huggingface_hub
import pytest

from engine.session.browsing import Wanted, cached


def test_what_was_used_last_is_offered_first(monkeypatch: pytest.MonkeyPatch) -> None:
    repos = [
        SimpleNamespace(repo_type=kind, repo_id=name, last_accessed=when, size_on_disk=2**20)
        for kind, name, when in (("model", "a/old", 1.0), ("model", "a/new", 9.0), ("dataset", "a/rows", 5.0))
    ]
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: SimpleNamespace(repos=repos))
    assert [offer.text for offer in cached(Wanted("model"))] == ["a/new", "a/old"]
    assert [offer.about for offer in cached(Wanted("rows"))] == ["on this machine, 1.0 MiB"]
    assert cached(Wanted("config")) == []
