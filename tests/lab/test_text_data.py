"""Text: the standard library's own, word pieces learned from it, windows that continue, and hidden pieces."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
import torch

from gradsieve import InputError
from gradsieve.lab.data.cache import MissingDataError
from gradsieve.lab.data.corpus import Corpus, in_three, read_library, read_text, read_treebank
from gradsieve.lab.data.masked import MaskedSet
from gradsieve.lab.data.tokens import CLASSIFY, MASK, SEPARATE, SPECIAL, as_bytes, as_pieces, as_words
from gradsieve.lab.data.windows import WindowSet


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADSIEVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus() -> Corpus:
    """A few real modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    documents = [(folder / f"{name}.py").read_text() for name in ("argparse", "ast", "bisect", "calendar", "heapq")]
    return Corpus(tuple(documents[:4]), tuple(documents[4:]))


def test_the_library_is_a_corpus_on_this_machine() -> None:
    corpus = read_library()
    assert sum(map(len, corpus.train)) > 5_000_000
    assert sum(map(len, corpus.test)) > 200_000
    assert not set(corpus.train) & set(corpus.test)
    assert corpus.digest() == read_library().digest()


def test_the_library_with_its_tests_is_the_library_and_more(tmp_path: Path) -> None:
    for name in ("json/decoder.py", "test/test_json.py", "json/tests/test_more.py", "site-packages/other.py"):
        for number in range(20):
            path = (tmp_path / name).with_stem(f"{Path(name).stem}{number}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {name} {number}\n" + "pass\n" * 12_000)
    without, whole = read_library(tmp_path), read_library(tmp_path, with_tests=True)
    said = [{document.split()[1] for document in (*corpus.train, *corpus.test)} for corpus in (without, whole)]
    assert said == [{"json/decoder.py"}, {"json/decoder.py", "test/test_json.py", "json/tests/test_more.py"}]
    assert set(without.test) <= set(whole.test)
    assert set(without.train) <= set(whole.train)


def test_a_tenth_of_the_documents_is_set_apart_for_validation() -> None:
    corpus = Corpus(tuple(f"document {number}" for number in range(200)), ("held out", "as well"))
    parts = in_three(corpus)
    assert parts == in_three(corpus)
    assert (len(parts.train), len(parts.validation)) == (180, 20)
    assert {*parts.train, *parts.validation} == set(corpus.train)
    assert parts.test == corpus.test
    assert list(parts.train) == [document for document in corpus.train if document in parts.train]
    reversed_ = in_three(corpus._replace(train=corpus.train[::-1]))
    assert set(reversed_.validation) == set(parts.validation)
    assert parts.validation != corpus.train[:20]


def test_copies_of_a_document_are_on_one_side() -> None:
    corpus = Corpus(("a", "b", "c", "a", "b", "c", "held out"), ("held out",))
    parts = in_three(corpus)
    sides = [set(part) for part in parts]
    assert all(sides)
    assert sum(map(len, sides)) == len(set.union(*sides))
    with pytest.raises(InputError, match="a validation part needs at least 2 different training files, got 1"):
        in_three(Corpus(("a", "a"), ("b",)))


def test_a_stripped_library_is_said(tmp_path: Path) -> None:
    (tmp_path / "few.py").write_text("pass")
    with pytest.raises(MissingDataError, match="has only 4 bytes of it: use a Python with its library"):
        read_library(tmp_path)


def test_a_digest_tells_texts_and_sides_apart() -> None:
    texts = [
        Corpus(("a", "b"), ("c",)),
        Corpus(("ab",), ("c",)),
        Corpus(("a",), ("b", "c")),
        Corpus(("a", "b"), ("d",)),
    ]
    assert len({text.digest() for text in texts}) == len(texts)


def test_a_folder_of_text_is_split_by_file_name(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    (tmp_path / "picture.png").write_bytes(b"\x89")
    corpus = read_text(tmp_path)
    assert len(corpus.train) + len(corpus.test) == 40
    assert 1 <= len(corpus.test) <= 12


@pytest.mark.parametrize("path", [None, "nowhere"])
def test_no_folder_of_text_is_said(tmp_path: Path, path: str | None) -> None:
    with pytest.raises(MissingDataError, match="give a folder of text: ptb.train.txt and ptb.test.txt"):
        read_text(path and tmp_path / path)


def test_treebank_is_read_in_words_with_ends_of_lines(tmp_path: Path) -> None:
    (tmp_path / "ptb.train.txt").write_text(" the cat <unk> N times \n the dog \n")
    with pytest.raises(MissingDataError, match="has ptb.train.txt but no ptb.test.txt"):
        read_text(tmp_path)
    (tmp_path / "ptb.test.txt").write_text(" the bird \n")
    corpus = read_treebank(tmp_path)
    assert corpus == read_text(tmp_path) == Corpus(("the cat <unk> N times <eos> the dog <eos>",), ("the bird <eos>",))
    tokens = as_words(corpus, 10)
    assert tokens.train.tolist() == [2, 4, 0, 3, 6, 1, 2, 5, 1]
    assert tokens.test.tolist() == [2, 0, 1]


def test_bytes_are_the_text(corpus: Corpus) -> None:
    tokens = as_bytes(corpus)
    assert bytes(tokens.test.tolist()).decode() == corpus.test[0]
    assert tokens.vocabulary == 256


def test_pieces_say_the_text_and_are_learned_once(corpus: Corpus, own_cache: Path) -> None:
    from tokenizers import Tokenizer, decoders

    tokens = as_pieces(corpus, 600)
    (folder,) = (path for path in own_cache.iterdir() if path.is_dir())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.decode(tokens.test.tolist()) == corpus.test[0]
    assert [tokenizer.token_to_id(piece) for piece in SPECIAL] == list(range(5))
    assert len(SPECIAL) <= int(tokens.train.min())
    assert int(tokens.train.max()) < tokens.vocabulary == 600 == tokenizer.get_vocab_size()
    (folder / "tokenizer.json").write_text(json.dumps("untouched"))
    assert torch.equal(as_pieces(corpus, 600).train, tokens.train)
    assert json.loads((folder / "tokenizer.json").read_text()) == "untouched"
    assert not torch.equal(as_pieces(corpus, 500).train[:100], tokens.train[:100])


def test_pieces_come_out_the_same_every_time(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of one cluster learn each for itself, and must agree."""
    first = as_pieces(corpus, 700)
    monkeypatch.setenv("GRADSIEVE_CACHE", str(tmp_path / "another"))
    second = as_pieces(corpus, 700)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.test, second.test)


def test_too_small_a_vocabulary_is_refused(corpus: Corpus) -> None:
    with pytest.raises(InputError, match="the vocabulary of a BPE must have at least 261 pieces, got 200"):
        as_pieces(corpus, 200)


def test_windows_continue_each_other() -> None:
    windows = WindowSet(torch.arange(32, dtype=torch.int32), 10)
    assert len(windows) == 3
    batch = windows.batch(torch.tensor([0, 1, 2]))
    assert batch.inputs.flatten().tolist() == list(range(30))
    assert batch.targets.flatten().tolist() == list(range(1, 31))
    with pytest.raises(InputError, match="a text of 5 symbols has no window of 5"):
        WindowSet(torch.arange(5), 5)


@pytest.fixture
def masked() -> MaskedSet:
    """Every piece differs from every other, so that where it came from is known."""
    return MaskedSet(torch.arange(5, 5 + 61 * 400, dtype=torch.int32), length=64, vocabulary=61 * 400 + 5)


def test_segments_and_special_pieces_are_where_they_belong(masked: MaskedSet) -> None:
    batch = masked.batch(torch.arange(200), torch.Generator().manual_seed(0))
    told = torch.zeros(200 * 64, dtype=torch.bool)
    told[batch.masked] = True
    original = batch.tokens.flatten().clone()
    original[batch.masked] = batch.words
    original = original.view(200, 64)
    assert (original[:, 0] == CLASSIFY).all()
    assert (original[:, [31, 63]] == SEPARATE).all()
    assert not told.view(200, 64)[:, [0, 31, 63]].any()
    assert batch.segments[0].tolist() == [0] * 32 + [1] * 32
    assert torch.equal(original[:, 1], torch.arange(200) * 61 + 5)
    follows_really = original[:, 32] == original[:, 30] + 1
    assert torch.equal(follows_really, batch.follows == 0)
    assert 0.35 < float(batch.follows.float().mean()) < 0.65


def test_shares_of_what_is_hidden(masked: MaskedSet) -> None:
    batch = masked.batch(torch.arange(400), torch.Generator().manual_seed(1))
    assert len(batch.masked) == 400 * round(0.15 * 61)
    assert len(batch.masked.unique()) == len(batch.masked)
    shown = batch.tokens.flatten()[batch.masked]
    share = {"hidden": shown == MASK, "same": shown == batch.words}
    assert abs(float(share["hidden"].float().mean()) - 0.8) < 0.03
    assert abs(float(share["same"].float().mean()) - 0.1) < 0.03


def test_what_is_hidden_depends_on_the_generator_and_in_tests_on_the_sample_alone(masked: MaskedSet) -> None:
    rows = torch.arange(6)
    one, same, other = (masked.batch(rows, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, same, strict=True))
    assert not torch.equal(one.tokens, other.tokens)
    whole, parts = masked.batch(rows), [masked.batch(rows[:2]), masked.batch(rows[2:])]
    assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))
    assert torch.equal(whole.words, torch.cat([part.words for part in parts]))
    assert torch.equal(whole.masked, torch.cat([parts[0].masked, parts[1].masked + 2 * 64]))


def test_too_little_text_to_hide_in_is_refused() -> None:
    with pytest.raises(InputError, match="a text of 70 pieces is less than two sequences of 64"):
        MaskedSet(torch.arange(70), 64, 100)
    with pytest.raises(InputError, match="at least 8 pieces, got 4"):
        MaskedSet(torch.arange(70), 4, 100)
