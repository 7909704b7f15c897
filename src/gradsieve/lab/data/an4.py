"""AN4 (Acero, 1993): 948 training and 130 test utterances of spelled names, numbers and commands.

Two layouts of the corpus can be read. Both have `etc/an4_train.fileids` and `etc/an4_train.transcription`, and the same
for test. The official audio has `wav/<fileid>.sph` (or .raw or .wav, in `wav/` or `raw/`). The distribution of features
has `feat/<fileid>.mfc` with 13 cepstral coefficients per frame.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gradsieve.errors import InputError
from gradsieve.lab.data.audio import read_audio
from gradsieve.lab.data.cache import MissingDataError
from gradsieve.lab.data.features import NUM_CEPSTRA, FeatureKind, Frames, features_of, normed
from gradsieve.lab.data.speech import FRAMES_PER_LABEL, SpeechPair, SpeechSet, Utterance, encode

AUDIO_FOLDERS, AUDIO_SUFFIXES = ("wav", "raw"), (".sph", ".raw", ".wav")
LINE = re.compile(r"(?:<s>)?(.*?)(?:</s>)?\s*\(([^()]+)\)\s*")


def read_an4(root: Path | None, kind: FeatureKind) -> SpeechPair:
    """The training and the test part. If the folder has only cepstra, they are used whatever `kind` says."""
    if root is None or not (root / "etc" / "an4_train.fileids").is_file():
        raise MissingDataError(
            f"AN4 cannot be fetched: give a folder with etc/an4_train.fileids and wav/ (audio) or feat/ "
            f"(cepstra), got {root or 'none'}; or train on generated speech, the default"
        )
    load = _loader(root, kind)
    train, test = (SpeechSet(tuple(_utterances(root, part, load))) for part in ("train", "test"))
    if not train.utterances or not test.utterances:
        raise MissingDataError(f"{root}/etc lists no utterances")
    return SpeechPair(train, test, train.utterances[0].frames.shape[1])


def _loader(root: Path, kind: FeatureKind) -> Callable[[str], Frames]:
    for folder in AUDIO_FOLDERS:
        for suffix in AUDIO_SUFFIXES:
            if next((root / folder).rglob(f"*{suffix}"), None) is not None:
                return lambda name: features_of(read_audio(_existing(root / folder / f"{name}{suffix}")), kind)
    if (root / "feat").is_dir():
        return lambda name: normed(read_cepstra(_existing(root / "feat" / f"{name}.mfc")))
    raise MissingDataError(f"{root} has neither wav/ with {', '.join(AUDIO_SUFFIXES)} files nor feat/ with .mfc files")


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise MissingDataError(f"etc lists an utterance that does not exist: {path}")
    return path


def read_cepstra(path: Path) -> Frames:
    """Read Sphinx's format: the number of floats as an int32, then the floats, all big-endian or all little-endian."""
    content = path.read_bytes()
    for order in (">", "<"):
        count = int(np.frombuffer(content[:4], f"{order}i4")[0]) if len(content) >= 4 else -1
        if count == len(content) // 4 - 1 and count > 0 and count % NUM_CEPSTRA == 0:
            return np.frombuffer(content[4:], f"{order}f4").astype(np.float32).reshape(-1, NUM_CEPSTRA)
    raise InputError(f"{path} is not a file of {NUM_CEPSTRA} cepstral coefficients per frame, or it is truncated")


def _utterances(root: Path, part: str, load: Callable[[str], Frames]) -> Iterator[Utterance]:
    """The utterances that have enough frames for their text. CTC cannot learn the others."""
    texts = _texts(root / "etc" / f"an4_{part}.transcription")
    for name in _lines(root / "etc" / f"an4_{part}.fileids"):
        text = texts.get(Path(name).name)
        if text is None:
            raise InputError(f"{root}/etc/an4_{part}.transcription has no text for {name}")
        frames = load(name)
        if len(frames) >= FRAMES_PER_LABEL * labels_needed(text):
            yield Utterance(frames, text)


def labels_needed(text: str) -> int:
    """The minimum number of frames for CTC: one per label, and a blank between equal labels."""
    labels = encode(text)
    return len(labels) + int((labels[1:] == labels[:-1]).sum())


def _texts(path: Path) -> dict[str, str]:
    texts = {}
    for line in _lines(path):
        match = LINE.fullmatch(line)
        if match is None:
            raise InputError(f"{path}: expected `WORDS (name)`, got {line!r}")
        texts[match[2].strip()] = " ".join(match[1].split())
    return texts


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise MissingDataError(f"AN4 needs {path}, which does not exist")
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]
