"""Features of a recording: 100 frames per second.

- `spectrogram`: log magnitudes of 161 frequencies in windows of 20 ms, as in Deep Speech.
- `cepstra`: 13 mel-frequency cepstral coefficients with the settings of the AN4 distribution: windows of 25.6 ms, 512
  points, 40 triangular filters from 130 to 6,800 Hz, logarithm, cosine transform (Davis and Mermelstein, 1980).

Both kinds are normalized per recording: zero mean and unit deviation of each coefficient.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gradsieve.errors import InputError
from gradsieve.lab.data.audio import RATE, Wave

Frames = NDArray[np.float32]
FeatureKind = Literal["spectrogram", "cepstra"]

HOP = RATE // 100
NUM_CEPSTRA = 13
NUM_FREQUENCIES = 161
SPECTROGRAM_WINDOW = 320
SPECTROGRAM_GAIN = 100  # moves quiet sounds out of the linear part of log(1 + x)
CEPSTRA_WINDOW, CEPSTRA_POINTS = 410, 512
NUM_FILTERS, LOWEST_HERTZ, HIGHEST_HERTZ = 40, 130.0, 6800.0
PREEMPHASIS = 0.97
FLOOR = 1e-5  # below the quietest recording; keeps the logarithm of silence finite
EPSILON = 1e-5


def features_of(recording: Wave, kind: FeatureKind) -> Frames:
    """Normalized features, (time, coefficient)."""
    if kind not in get_args(FeatureKind):
        raise InputError(f"features must be one of {', '.join(get_args(FeatureKind))}, got {kind!r}")
    return normed(spectrogram(recording) if kind == "spectrogram" else cepstra(recording))


def num_features(kind: FeatureKind) -> int:
    """Coefficients per frame."""
    return NUM_FREQUENCIES if kind == "spectrogram" else NUM_CEPSTRA


def spectrogram(recording: Wave) -> Frames:
    """Log magnitudes, (time, frequency)."""
    spectrum = np.fft.rfft(_windows(recording, SPECTROGRAM_WINDOW), axis=1)
    magnitudes: Frames = np.log1p(np.abs(spectrum) * SPECTROGRAM_GAIN).astype(np.float32)
    return magnitudes


def cepstra(recording: Wave) -> Frames:
    """Mel-frequency cepstral coefficients, (time, coefficient)."""
    lifted = np.append(recording[:1], recording[1:] - PREEMPHASIS * recording[:-1])
    power = np.abs(np.fft.rfft(_windows(lifted, CEPSTRA_WINDOW), CEPSTRA_POINTS, axis=1)) ** 2
    energies = np.log(np.maximum(power @ mel_filters(), FLOOR))
    return (energies @ _cosines()).astype(np.float32)


def normed(frames: Frames) -> Frames:
    """Normalize each coefficient over the recording."""
    centred = frames - frames.mean(axis=0)
    scaled: Frames = (centred / (centred.std(axis=0) + EPSILON)).astype(np.float32)
    return scaled


@cache
def mel_filters() -> NDArray[np.float64]:
    """Weights (frequency, filter): triangles evenly spaced on the mel scale."""
    edges = _hertz(np.linspace(_mel(LOWEST_HERTZ), _mel(HIGHEST_HERTZ), NUM_FILTERS + 2))
    bins = np.arange(CEPSTRA_POINTS // 2 + 1)[:, None] * RATE / CEPSTRA_POINTS
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    filters: NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling))
    filters.flags.writeable = False
    return filters


@cache
def _cosines() -> NDArray[np.float64]:
    """The orthonormal cosine transform, (filter, coefficient)."""
    filters, coefficients = np.arange(NUM_FILTERS)[:, None], np.arange(NUM_CEPSTRA)
    cosines: NDArray[np.float64] = np.cos(np.pi * coefficients * (filters + 0.5) / NUM_FILTERS)
    cosines *= np.where(coefficients == 0, np.sqrt(1 / NUM_FILTERS), np.sqrt(2 / NUM_FILTERS))
    cosines.flags.writeable = False
    return cosines


def _windows(recording: Wave, width: int) -> NDArray[np.float64]:
    """Overlapping parts under a Hamming window. The end is padded with silence."""
    count = max(1, -(-len(recording) // HOP))
    padded = np.zeros((count - 1) * HOP + width)
    padded[: len(recording)] = recording[: len(padded)]
    shape = np.lib.stride_tricks.sliding_window_view(padded, width)[::HOP]
    windowed: NDArray[np.float64] = shape * np.hamming(width)
    return windowed


def _mel(hertz: float) -> float:
    return 2595 * float(np.log10(1 + hertz / 700))


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return 700 * (10 ** (mel / 2595) - 1)
