"""Network interfaces of this machine, as Linux lists them."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

CLASS_NET = Path("/sys/class/net")


@dataclass(frozen=True)
class Interfaces:
    """Interfaces that have a carrier, without loopback. None where the system does not tell."""

    host: str
    physical: tuple[str, ...] | None
    virtual: tuple[str, ...] | None  # such as bridges, and the interfaces of containers

    def __str__(self) -> str:
        if self.physical is None or self.virtual is None:
            return f"{self.host}: number of NICs unknown on this system"
        names = ", ".join(self.physical) or "none visible"
        inside = f"; virtual: {', '.join(self.virtual)}" if self.virtual and not self.physical else ""
        plural = "NIC" if len(self.physical) == 1 else "NICs"
        return f"{self.host}: {len(self.physical)} {plural} with carrier ({names}{inside})"


def interfaces(folder: Path = CLASS_NET) -> Interfaces:
    host = socket.gethostname()
    if not folder.is_dir():
        return Interfaces(host, None, None)
    physical: list[str] = []
    virtual: list[str] = []
    for _, name in (
        socket.if_nameindex() if folder == CLASS_NET else enumerate(sorted(p.name for p in folder.iterdir()))
    ):
        if _read(folder / name / "type") == "772":  # loopback
            continue
        own = folder != CLASS_NET or _read(folder / name / "ifindex") == str(socket.if_nametoindex(name))
        if not own:  # in a network namespace, /sys may still show the interfaces outside
            virtual += [] if name == "lo" else [name]
        elif _read(folder / name / "carrier") == "1":
            (physical if (folder / name / "device").exists() else virtual).append(name)
    return Interfaces(host, tuple(physical), tuple(virtual))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # also while the interface is down
        return ""
