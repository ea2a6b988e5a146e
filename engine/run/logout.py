"""Whether this machine ends a person's processes at logout, and what that means for a run. Standard library only."""

from __future__ import annotations

import configparser
import getpass
from pathlib import Path


def kills_at_logout(root: Path = Path("/"), user: str | None = None) -> tuple[bool, str]:
    """Whether this machine ends a person's processes at logout, and in words what that means for a run."""
    if not (root / "run/systemd/system").exists():
        return False, "This machine does not end your processes at logout."
    try:
        user = user or getpass.getuser()
    except (KeyError, OSError):
        user = ""
    if user and (root / "var/lib/systemd/linger" / user).exists():
        return False, "Lingering is on for you: your processes stay after logout."
    if _kill_user_processes(root):
        return True, "This machine ends your processes at logout. Before you log out run: loginctl enable-linger"
    return False, "This machine does not end your processes at logout."


class _WithCase(configparser.ConfigParser):
    """Names of options as they are written."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def _kill_user_processes(root: Path) -> bool:
    """systemd's setting; later files win, and the default of a system without any is no."""
    places = [root / "etc/systemd/logind.conf"]
    for folder in ("usr/lib/systemd/logind.conf.d", "etc/systemd/logind.conf.d", "run/systemd/logind.conf.d"):
        places += sorted((root / folder).glob("*.conf"))
    answer = False
    for place in places:
        reader = _WithCase(strict=False, interpolation=None)
        try:
            reader.read(place, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        value = reader.get("Login", "KillUserProcesses", fallback=None)
        if value is not None:
            answer = value.strip().lower() in ("yes", "true", "1", "on")
    return answer
