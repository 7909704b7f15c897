"""Text as token ids: bytes, words of a fixed vocabulary, or pieces of a BPE learned from the text itself.

Learned vocabularies and the encoded text are cached under a hash of the text, so that the second run starts
immediately and all ranks of a machine share them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradsieve.errors import InputError
from gradsieve.lab.data.cache import cached
from gradsieve.lab.data.corpus import Corpus

BYTES = 256
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, CLASSIFY, SEPARATE, MASK = range(len(SPECIAL))
MIN_PIECES = BYTES + len(SPECIAL)
FORM = 1  # version of the cached data: raise when the same text would give other ids


class Tokens(NamedTuple):
    """Both parts as one long sequence each, and the size of the vocabulary."""

    train: Tensor
    test: Tensor
    vocabulary: int


def as_bytes(corpus: Corpus) -> Tokens:
    """The bytes of the text."""
    train, test = (torch.from_numpy(np.frombuffer("".join(part).encode(), np.uint8).copy()) for part in corpus)
    return Tokens(train, test, BYTES)


def as_words(corpus: Corpus, vocabulary: int) -> Tokens:
    """Words separated by blanks. Rare and unknown words share the id 0."""
    words = [" ".join(part).split() for part in corpus]
    frequent = Counter(words[0]).most_common()
    known = [word for word, _ in sorted(frequent, key=lambda pair: (-pair[1], pair[0])) if word != "<unk>"]
    number = {word: i + 1 for i, word in enumerate(known[: vocabulary - 1])}
    train, test = (torch.tensor([number.get(word, 0) for word in part], dtype=torch.int32) for part in words)
    return Tokens(train, test, vocabulary)


def as_pieces(corpus: Corpus, vocabulary: int) -> Tokens:
    """Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019). The first five ids are BERT's special tokens."""
    if vocabulary < MIN_PIECES:
        raise InputError(f"the vocabulary of a BPE must have at least {MIN_PIECES} pieces, got {vocabulary}")

    def make(folder: Path) -> None:
        _learn(corpus, vocabulary, folder)

    folder = cached(f"pieces-{FORM}-{vocabulary}-{corpus.digest()[:24]}", make)
    train, test = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in Corpus._fields)
    return Tokens(train, test, vocabulary)


def _learn(corpus: Corpus, vocabulary: int, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.train, trainer, length=len(corpus.train))
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, part in corpus._asdict().items():
        encoded = tokenizer.encode_batch(list(part), add_special_tokens=False)
        np.save(folder / f"{name}.npy", np.concatenate([np.array(one.ids, dtype=np.int32) for one in encoded]))
