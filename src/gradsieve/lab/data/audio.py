"""Audio files as floats in (-1, 1): NIST SPHERE, headerless 16-bit, and WAV, one channel at 16 kHz."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradsieve.errors import InputError

Wave = NDArray[np.float32]

RATE = 16_000
FULL_SCALE = 32768.0
SPHERE_MAGIC = b"NIST_1A\n"


def read_audio(path: Path) -> Wave:
    """Read a file; its suffix decides the format."""
    readers = {".sph": _sphere, ".raw": _raw, ".wav": _wav}
    if path.suffix not in readers:
        raise InputError(f"{path} must end in one of {', '.join(readers)}")
    samples = readers[path.suffix](path)
    if not len(samples):
        raise InputError(f"{path} has no samples")
    return (samples / FULL_SCALE).astype(np.float32)


def _raw(path: Path) -> NDArray[np.float64]:
    """AN4's headerless files are big-endian."""
    content = path.read_bytes()
    return np.frombuffer(content[: len(content) // 2 * 2], dtype=">i2").astype(np.float64)


def _sphere(path: Path) -> NDArray[np.float64]:
    content = path.read_bytes()
    if not content.startswith(SPHERE_MAGIC):
        raise InputError(f"{path} is not a NIST SPHERE file: it must start with NIST_1A")
    try:
        header_bytes = int(content[8:16])
        lines = content[16:header_bytes].decode("ascii", "replace").splitlines()
        fields = {parts[0]: parts[2] for line in lines if len(parts := line.split(maxsplit=2)) == 3}
        rate, order = int(fields["sample_rate"]), fields.get("sample_byte_format", "10").strip()
    except (ValueError, KeyError) as error:
        raise InputError(f"{path} has a damaged SPHERE header: {error}") from None
    coding = fields.get("sample_coding", "pcm").strip()
    _require(path, rate, int(fields.get("channel_count", "1")), int(fields.get("sample_n_bytes", "2")))
    if coding != "pcm" or order not in ("01", "10"):
        raise InputError(f"{path} is coded as {coding} {order}; it must be pcm in order 01 or 10: decompress it first")
    body = content[header_bytes:]
    return np.frombuffer(body[: len(body) // 2 * 2], dtype=">i2" if order == "10" else "<i2").astype(np.float64)


def _wav(path: Path) -> NDArray[np.float64]:
    try:
        with wave.open(str(path), "rb") as file:
            _require(path, file.getframerate(), file.getnchannels(), file.getsampwidth())
            return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float64)
    except (wave.Error, EOFError) as error:
        raise InputError(f"{path} cannot be read as WAV: {error}") from None


def _require(path: Path, rate: int, channels: int, sample_bytes: int) -> None:
    if (rate, channels, sample_bytes) != (RATE, 1, 2):
        raise InputError(
            f"{path} has {channels} channels at {rate} Hz with {sample_bytes} bytes per sample; "
            f"expected 1 channel at {RATE} Hz with 2 bytes per sample"
        )
