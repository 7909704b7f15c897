"""SYNTHETIC speech-like audio, for machines without recordings. It contains no human voice.

Every letter has its own sound: a buzz of harmonics shaped by two resonances, or hiss for some letters. A word is the
sequence of its letters with gliding transitions. Words are separated by silence. Speakers differ in pitch, length of
the vocal tract, speed and loudness. Noise is added. The words are numbers and commands. The task has the form of speech
recognition, not its difficulty: results say how training goes, not how well speech is recognized.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradsieve.lab.data.audio import RATE, Wave
from gradsieve.lab.data.cache import cached
from gradsieve.lab.data.features import FeatureKind, features_of, num_features
from gradsieve.lab.data.speech import ALPHABET, SpeechPair, SpeechSet, Utterance

WORDS = (
    "ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE", "TEN", "ELEVEN", "TWELVE",
    "TWENTY", "THIRTY", "FORTY", "FIFTY", "GO", "STOP", "YES", "NO", "LEFT", "RIGHT", "UP", "DOWN", "START", "HELP",
    "ENTER", "ERASE", "REPEAT",
)  # fmt: skip
MAX_WORDS = 4
HISSING = frozenset("CFHKPSTXZ")
HARMONICS = 40
HOLD = 80  # samples for which resonances are constant
LETTER_SECONDS = (0.07, 0.11)
GAP_SECONDS = (0.06, 0.12)
BANDWIDTH_HERTZ = 120.0
NOISE = 0.01
FORM = 1  # version of the cached data: raise when the same seed would give other sounds

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Speaker:
    """What is constant within an utterance."""

    pitch_hertz: float
    tract: float  # relative length of the vocal tract; shorter raises all resonances
    speed: float
    loudness: float


def read_synthetic(kind: FeatureKind, num_train: int = 600, num_test: int = 100, seed: int = 0) -> SpeechPair:
    """Utterances decided by the seed; generated once, then cached. Every utterance has its own speaker."""

    def make(folder: Path) -> None:
        generator = np.random.default_rng(seed)
        made = [_utterance(generator, kind) for _ in range(num_train + num_test)]
        np.save(folder / "frames.npy", np.concatenate([one.frames for one in made]))
        (folder / "texts.json").write_text(json.dumps([(one.text, len(one.frames)) for one in made]))

    folder = cached(f"synthetic-speech-{FORM}-{kind}-{num_train}-{num_test}-{seed}", make)
    texts = json.loads((folder / "texts.json").read_text())
    ends = np.cumsum([length for _, length in texts])
    frames = np.split(np.load(folder / "frames.npy"), ends[:-1])
    utterances = [Utterance(part, text) for part, (text, _) in zip(frames, texts, strict=True)]
    return SpeechPair(SpeechSet(utterances[:num_train]), SpeechSet(utterances[num_train:]), num_features(kind))


def speak(text: str, generator: np.random.Generator) -> Wave:
    """A recording of this text by a random speaker."""
    speaker = Speaker(
        pitch_hertz=generator.uniform(90, 220),
        tract=generator.uniform(0.88, 1.12),
        speed=generator.uniform(0.85, 1.2),
        loudness=generator.uniform(0.3, 0.9),
    )
    voiced, hiss, first, second = _contours(text, speaker, generator)
    sound = _buzz(voiced, first, second, speaker, generator) + _hiss(hiss, second, generator)
    sound *= speaker.loudness / max(1e-9, float(np.abs(sound).max()))
    return (sound + NOISE * generator.standard_normal(len(sound))).astype(np.float32)


def _utterance(generator: np.random.Generator, kind: FeatureKind) -> Utterance:
    text = " ".join(generator.choice(WORDS, size=generator.integers(1, MAX_WORDS + 1)))
    return Utterance(features_of(speak(text, generator), kind), text)


def _resonances(letter: str) -> tuple[float, float]:
    """Both resonances in hertz, different for each letter."""
    index = ALPHABET.index(letter) - 1
    return 250.0 + 110.0 * (index % 6), 1000.0 + 420.0 * (index // 6)


def _contours(text: str, speaker: Speaker, generator: np.random.Generator) -> tuple[Floats, Floats, Floats, Floats]:
    """Per sample: loudness of the buzz, loudness of the hiss, and the two resonances."""
    rows: list[tuple[float, float, float, float]] = [(0.0, 0.0, 500.0, 1500.0)]
    seconds = [generator.uniform(*GAP_SECONDS)]
    for letter in text:
        is_gap = letter == " "
        seconds.append(generator.uniform(*(GAP_SECONDS if is_gap else LETTER_SECONDS)) / speaker.speed)
        if is_gap:
            rows.append((0.0, 0.0, *rows[-1][2:]))
        else:
            is_hissing = letter in HISSING
            first, second = (resonance / speaker.tract for resonance in _resonances(letter))
            rows.append((0.15 if is_hissing else 1.0, 0.6 if is_hissing else 0.0, first, second))
    rows.append((0.0, 0.0, *rows[-1][2:]))
    seconds.append(generator.uniform(*GAP_SECONDS))
    ends = np.cumsum(seconds)
    times = np.arange(int(ends[-1] * RATE)) / RATE
    middles = ends - np.array(seconds) / 2
    table = np.array(rows)
    voiced, hiss, first, second = (np.interp(times, middles, table[:, column]) for column in range(4))
    return voiced, hiss, first, second


def _buzz(voiced: Floats, first: Floats, second: Floats, speaker: Speaker, generator: np.random.Generator) -> Floats:
    """Harmonics of a slightly falling pitch, with amplitudes shaped by the resonances."""
    drift = np.linspace(1.05, 0.92, len(voiced)) * (1 + 0.01 * generator.standard_normal())
    pitch = speaker.pitch_hertz * drift
    turn = np.exp(2j * np.pi * np.cumsum(pitch) / RATE)
    held = [contour[::HOLD] for contour in (pitch, first, second)]
    harmonics = np.arange(1, HARMONICS + 1)[:, None] * held[0]
    strengths = 1 / (1 + ((harmonics - held[1]) / BANDWIDTH_HERTZ) ** 2)
    strengths += 0.6 / (1 + ((harmonics - held[2]) / BANDWIDTH_HERTZ) ** 2)
    sound, turned = np.zeros(len(voiced)), np.ones_like(turn)
    for strength in strengths:
        turned *= turn  # one multiplication per harmonic instead of a sine: ten times faster
        sound += turned.imag * np.repeat(strength, HOLD)[: len(sound)]
    return sound * voiced


def _hiss(hiss: Floats, centre: Floats, generator: np.random.Generator) -> Floats:
    """Noise around the second resonance."""
    envelope = np.convolve(generator.standard_normal(len(hiss)), np.ones(12) / 12, mode="same")
    return 4 * envelope * np.cos(2 * np.pi * np.cumsum(centre + 1500) / RATE) * hiss
