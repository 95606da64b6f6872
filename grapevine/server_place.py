"""Where a run's own server is: its password and its port, as they lie in the run's folder.

Guarantees: both files are read here and nowhere else; one that is damaged is told by its name, and no part of a password is.
"""

from __future__ import annotations

from pathlib import Path

from common.addresses import LOOPBACK
from common.settings import SettingsError


def kept_password(folder: Path) -> str | None:
    """The password; None where there is none yet, or a damaged one."""
    try:
        password = (folder / "password").read_text(encoding="ascii")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return password if password and password.replace("-", "").replace("_", "").isalnum() else None


def kept_port(folder: Path) -> int | None:
    """The port; None where there is none yet, or a damaged one."""
    try:
        text = (folder / "port").read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() and len(text) < 6 and 0 < int(text) < 65536 else None


def server_url(folder: Path) -> str | None:
    """The server's address on this machine; None where there is no server. Raises SettingsError when a file is damaged."""
    if not (folder / "port").exists():
        return None
    password, port = kept_password(folder), kept_port(folder)
    if password is None or port is None:
        name = "port" if password is not None else "password"
        raise SettingsError(f"{folder / name} is damaged; `grapevine up` makes a new one when the run is started again")
    return f"redis://:{password}@{LOOPBACK}:{port}/0"
