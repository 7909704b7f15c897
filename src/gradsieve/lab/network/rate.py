"""The rate of a link, and the token bucket that limits it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gradsieve.errors import InputError

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SLOWEST_BITS = 100 * 10**3
FASTEST_BITS = 100 * 10**9
FORM = re.compile(r"(\d+(?:\.\d+)?)([kmg]bit)", re.IGNORECASE)

PACKET_SECONDS = 1.3e-3  # time that the largest segment takes on the link
SMALLEST_PACKET_BYTES = 4096
LARGEST_PACKET_BYTES = 65536  # the kernel's default limit for one segment
BURST_SECONDS = 1e-3  # a bucket holds at least this much traffic
BURST_PACKETS = 1.25  # a segment with the headers of all its packets must fit, or it is split
QUEUE_SECONDS = 0.05  # of traffic that waits in the queue before packets are dropped


@dataclass(frozen=True)
class Rate:
    """Bits per second in each direction; None is unlimited."""

    bits_per_second: int | None

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Parse `1gbit`, `250mbit`, `1.5mbit` or `unlimited`."""
        if text == "unlimited":
            return cls(None)
        found = FORM.fullmatch(text.strip())
        bits = round(float(found[1]) * UNITS[found[2].lower()]) if found else 0
        if not SLOWEST_BITS <= bits <= FASTEST_BITS:
            raise InputError(f"a rate must be unlimited or between 100kbit and 100gbit, such as 250mbit, got {text!r}")
        return cls(bits)

    def __str__(self) -> str:
        if self.bits_per_second is None:
            return "unlimited"
        unit = next(name for name in reversed(UNITS) if self.bits_per_second >= UNITS[name])
        return f"{self.bits_per_second / UNITS[unit]:g}{unit}"

    @property
    def packet_bytes(self) -> int:
        """The largest segment that the sender's kernel may hand to the link.

        After every pause a token bucket lets one burst pass at full speed, and a burst must hold a whole segment. At
        100 Mbit/s the default segments need a burst of 128 kB: a message of 100 kB then takes 1.2 ms instead of 8.4.
        Segments of 16 kB need a burst of 20 kB, and the message takes 7.4 ms. Sparse exchanges send small messages,
        so the error would matter.
        """
        if self.bits_per_second is None:
            return LARGEST_PACKET_BYTES
        wanted = round(self.bits_per_second / 8 * PACKET_SECONDS)
        return min(max(wanted, SMALLEST_PACKET_BYTES), LARGEST_PACKET_BYTES)

    @property
    def bucket(self) -> list[str]:
        """The arguments of `tc … tbf`; empty if the rate is unlimited."""
        if self.bits_per_second is None:
            return []
        burst = round(max(BURST_PACKETS * self.packet_bytes, self.bits_per_second / 8 * BURST_SECONDS))
        limit = burst + round(max(self.bits_per_second / 8 * QUEUE_SECONDS, 4 * self.packet_bytes))
        return ["tbf", "rate", f"{self.bits_per_second}bit", "burst", f"{burst}b", "limit", f"{limit}b"]
