"""Whether a run outlives the logout is read off what systemd is told."""

from __future__ import annotations

from pathlib import Path

from engine.run.logout import kills_at_logout


def _box(root: Path, **files: str) -> Path:
    (root / "run/systemd/system").mkdir(parents=True)
    for name, text in files.items():
        place = root / name.replace("__", "/").replace("_DOT_", ".")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


def test_logout_is_judged_by_what_systemd_is_told(tmp_path: Path) -> None:
    kills = "[Login]\nKillUserProcesses=yes\n"
    assert kills_at_logout(tmp_path / "none", "me") == (False, "This machine does not end your processes at logout.")
    assert not kills_at_logout(_box(tmp_path / "a"), "me")[0]
    box = _box(tmp_path / "b", etc__systemd__logind_DOT_conf=kills)
    ends, words = kills_at_logout(box, "me")
    assert ends
    assert "loginctl enable-linger" in words
    (box / "var/lib/systemd/linger").mkdir(parents=True)
    (box / "var/lib/systemd/linger/me").touch()
    assert not kills_at_logout(box, "me")[0]
    late = _box(tmp_path / "c", etc__systemd__logind_DOT_conf=kills)
    (late / "etc/systemd/logind.conf.d").mkdir()
    (late / "etc/systemd/logind.conf.d/9.conf").write_text("[Login]\nKillUserProcesses=no\n")
    assert not kills_at_logout(late, "me")[0]
