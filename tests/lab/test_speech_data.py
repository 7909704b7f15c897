"""Speech: AN4 in its layouts, audio formats, features, generated sound, and counting errors."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve import InputError
from gradsieve.lab.data.an4 import labels_needed, read_an4, read_cepstra
from gradsieve.lab.data.audio import read_audio
from gradsieve.lab.data.cache import MissingDataError
from gradsieve.lab.data.features import cepstra, features_of, mel_filters, spectrogram
from gradsieve.lab.data.speech import ALPHABET, decode, edit_distance, encode, greedy
from gradsieve.lab.data.spoken import WORDS, read_synthetic, speak

RATE = 16_000


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSIEVE_CACHE", str(tmp_path / "cache"))


def tone(hertz: float, seconds: float = 0.5) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * RATE)) / RATE)).astype(np.float32)


def write_sphere(path: Path, samples: np.ndarray, order: str = "10", rate: int = RATE) -> None:
    header = f"NIST_1A\n   1024\nsample_count -i {len(samples)}\nsample_rate -i {rate}\nchannel_count -i 1\n"
    header += f"sample_n_bytes -i 2\nsample_byte_format -s2 {order}\nsample_coding -s3 pcm\nend_head\n"
    path.write_bytes(header.encode().ljust(1024) + samples.astype(">i2" if order == "10" else "<i2").tobytes())


def write_wav(path: Path, samples: np.ndarray, rate: int = RATE) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


def test_every_format_gives_the_same_recording(tmp_path: Path) -> None:
    samples = (tone(440) * 32767).astype(np.int16)
    write_sphere(tmp_path / "big.sph", samples)
    write_sphere(tmp_path / "little.sph", samples, order="01")
    write_wav(tmp_path / "one.wav", samples)
    (tmp_path / "one.raw").write_bytes(samples.astype(">i2").tobytes())
    for name in ("big.sph", "little.sph", "one.wav", "one.raw"):
        np.testing.assert_array_equal(read_audio(tmp_path / name), samples.astype(np.float32) / 32768)


def test_audio_of_another_kind_is_refused(tmp_path: Path) -> None:
    samples = np.zeros(100, np.int16)
    write_sphere(tmp_path / "slow.sph", samples, rate=8000)
    sentence = "1 channels at 8000 Hz with 2 bytes per sample; expected 1 channel at 16000 Hz with 2 bytes per sample"
    with pytest.raises(InputError, match=sentence):
        read_audio(tmp_path / "slow.sph")
    write_sphere(tmp_path / "odd.sph", samples, order="1")
    with pytest.raises(InputError, match="coded as pcm 1; it must be pcm in order 01 or 10"):
        read_audio(tmp_path / "odd.sph")
    (tmp_path / "not.sph").write_bytes(b"RIFF")
    with pytest.raises(InputError, match="is not a NIST SPHERE file: it must start with NIST_1A"):
        read_audio(tmp_path / "not.sph")
    (tmp_path / "song.mp3").write_bytes(b"")
    with pytest.raises(InputError, match=r"must end in one of .sph, .raw, .wav"):
        read_audio(tmp_path / "song.mp3")
    (tmp_path / "empty.raw").write_bytes(b"")
    with pytest.raises(InputError, match="has no samples"):
        read_audio(tmp_path / "empty.raw")


def test_a_tone_is_found_at_its_frequency() -> None:
    frames = spectrogram(tone(1000))
    assert frames.shape == (50, 161)
    assert (frames[5:45].argmax(1) == 1000 / (RATE / 320)).all()


def test_filters_cover_the_band_and_peak_in_order() -> None:
    filters = mel_filters()
    hertz = np.arange(257) * RATE / 512
    assert filters.shape == (257, 40)
    assert (filters[(hertz < 130) | (hertz > 6800)] == 0).all()
    assert (np.diff(filters.argmax(0)) > 0).all()


def test_cepstra_ignore_loudness_but_for_the_first_and_tell_sounds_apart() -> None:
    sound = tone(500) + tone(1500) + tone(3000)
    quiet, loud = cepstra(sound * 0.1), cepstra(sound)
    assert quiet.shape == (50, 13)
    np.testing.assert_allclose(quiet[5:45, 1:], loud[5:45, 1:], atol=0.05)
    assert (loud[5:45, 0] > quiet[5:45, 0] + 10).all()
    assert np.abs(cepstra(tone(300))[10, 1:] - cepstra(tone(3000))[10, 1:]).max() > 5


@pytest.mark.parametrize("kind", ["spectrogram", "cepstra"])
def test_features_are_normed_and_finite_even_for_silence(kind: str) -> None:
    generator = np.random.default_rng(0)
    frames = features_of(speak("SEVEN", generator), kind)  # type: ignore[arg-type]
    np.testing.assert_allclose(frames.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(frames.std(0), 1, atol=1e-2)
    assert np.isfinite(features_of(np.zeros(5000, np.float32), kind)).all()  # type: ignore[arg-type]


def write_an4(root: Path, folder: str, suffix: str) -> Path:
    """Two utterances to train on, one to test, in the distribution's layout."""
    (root / "etc").mkdir(parents=True)
    utterances = {"train": {"an1-x-b": "YES", "cen2-x-b": "TWO FOUR"}, "test": {"an9-y-b": "GO"}}
    for part, texts in utterances.items():
        home = f"an4{'' if part == 'train' else 'test'}_clstk/x"
        (root / folder / home).mkdir(parents=True)
        (root / "etc" / f"an4_{part}.fileids").write_text("".join(f"{home}/{name}\n" for name in texts))
        lines = [f"<s> {text} </s> ({name})\n" for name, text in texts.items()]
        (root / "etc" / f"an4_{part}.transcription").write_text("".join(lines))
        for name, text in texts.items():
            sound = speak(text, np.random.default_rng(len(text)))
            path = root / folder / home / f"{name}{suffix}"
            if suffix == ".mfc":
                frames = cepstra(sound)
                path.write_bytes(np.array([frames.size], ">i4").tobytes() + frames.astype(">f4").tobytes())
            else:
                write_sphere(path, (sound * 32767).astype(np.int16))
    return root


@pytest.mark.parametrize(("folder", "suffix"), [("wav", ".sph"), ("feat", ".mfc")])
def test_both_layouts_of_an4_are_read(tmp_path: Path, folder: str, suffix: str) -> None:
    pair = read_an4(write_an4(tmp_path / "an4", folder, suffix), "cepstra")
    assert [one.text for one in pair.train.utterances] == ["YES", "TWO FOUR"]
    assert [one.text for one in pair.test.utterances] == ["GO"]
    assert pair.features == 13
    batch = pair.train.batch(torch.tensor([1, 0]))
    assert batch.frames.shape == (2, int(batch.lengths.max()), 13)
    assert decode(batch.labels.tolist()) == "TWO FOURYES"
    assert (batch.frames[1, int(batch.lengths[1]) :] == 0).all()


def test_both_layouts_of_an4_agree(tmp_path: Path) -> None:
    audio = read_an4(write_an4(tmp_path / "a", "wav", ".sph"), "cepstra").train.utterances
    cepstral = read_an4(write_an4(tmp_path / "b", "feat", ".mfc"), "cepstra").train.utterances
    for one, other in zip(audio, cepstral, strict=True):
        np.testing.assert_allclose(one.frames, other.frames, atol=0.05)


def test_missing_and_damaged_parts_of_an4_are_said(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"give a folder with etc/an4_train.fileids .* got none"):
        read_an4(None, "cepstra")
    root = write_an4(tmp_path / "an4", "feat", ".mfc")
    file = root / "feat/an4_clstk/x/an1-x-b.mfc"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InputError, match="not a file of 13 cepstral coefficients per frame, or it is truncated"):
        read_an4(root, "cepstra")
    file.unlink()
    with pytest.raises(MissingDataError, match=r"etc lists an utterance that does not exist: .*an1-x-b.mfc"):
        read_an4(root, "cepstra")
    (root / "etc" / "an4_train.transcription").write_text("YES an1-x-b\n")
    with pytest.raises(InputError, match=r"expected `WORDS \(name\)`, got 'YES an1-x-b'"):
        read_an4(root, "cepstra")


def test_little_endian_cepstra_are_read_too(tmp_path: Path) -> None:
    frames = np.arange(26, dtype=np.float32).reshape(2, 13)
    (tmp_path / "x.mfc").write_bytes(np.array([26], "<i4").tobytes() + frames.astype("<f4").tobytes())
    np.testing.assert_array_equal(read_cepstra(tmp_path / "x.mfc"), frames)


def test_generated_speech_is_the_same_for_the_same_seed_and_says_what_it_should() -> None:
    first, again = read_synthetic("cepstra", 6, 3, seed=1), read_synthetic("cepstra", 6, 3, seed=1)
    other = read_synthetic("cepstra", 6, 3, seed=2)
    assert (len(first.train), len(first.test)) == (6, 3)
    for one, same in zip(first.train.utterances, again.train.utterances, strict=True):
        np.testing.assert_array_equal(one.frames, same.frames)
    assert [one.text for one in first.train.utterances] != [one.text for one in other.train.utterances]
    for one in (*first.train.utterances, *first.test.utterances):
        assert set(one.text.split()) <= set(WORDS)
        assert len(one.frames) >= 2 * labels_needed(one.text)


def test_labels_are_the_papers_29() -> None:
    assert len(ALPHABET) == 29
    assert decode(encode("it's Me").tolist()) == "IT'S ME"
    with pytest.raises(InputError, match=r"'NO. 5' cannot be labels: \['.', '5'\]"):
        encode("No. 5".upper())


def test_equal_neighbours_need_a_blank_between() -> None:
    assert labels_needed("HELLO") == 6


def test_greedy_decoding_takes_repeats_once_and_leaves_blanks_out() -> None:
    path = [*encode("AAB").tolist(), 0, 0, *encode("BC").tolist()]
    scores = torch.nn.functional.one_hot(torch.tensor(path), 29).float()
    assert greedy(scores) == "ABBC"
    assert greedy(torch.zeros(0, 29)) == ""


def slow_distance(one: str, other: str) -> int:
    if not one or not other:
        return len(one) + len(other)
    return min(
        slow_distance(one[1:], other) + 1,
        slow_distance(one, other[1:]) + 1,
        slow_distance(one[1:], other[1:]) + (one[0] != other[0]),
    )


@given(st.text("ABC", max_size=5), st.text("ABC", max_size=5))
def test_edit_distance_is_the_definition(one: str, other: str) -> None:
    assert edit_distance(one, other) == slow_distance(one, other)
