"""Data sets, readers of foreign files, downloads, and the phases of every protocol."""

import gzip
import hashlib
import os
import pickle
import shutil
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fire_core import UserError
from vision import data as vision_data
from vision.data import load
from vision.images import Images, pixel_statistics
from vision.protocols import PhaseData, make_phases
from vision.readers import read_class_folders
from vision.schedule import batch_indices, make_inputs, pick
from vision.torchvision_import import import_torchvision


@pytest.fixture(scope="module")
def fashion():
    return load("fashion_mnist")


def test_shipped_subset_is_balanced_and_its_first_classes_are_those_alone(fashion):
    assert fashion.train_labels.bincount().tolist() == [1000] * 10
    assert fashion.test_labels.bincount().tolist() == [200] * 10
    assert fashion.train_images.shape[1:] == fashion.test_images.shape[1:] == (1, 28, 28)
    train, test = ({*map(bytes, part.numpy())} for part in (fashion.train_images, fashion.test_images))
    assert not train & test
    some = load("fashion_mnist", classes=3)
    assert some.classes == 3 and some.train_labels.unique().tolist() == [0, 1, 2]
    assert torch.equal(some.train_images, fashion.train_images[fashion.train_labels < 3])
    assert torch.equal(some.test_labels, fashion.test_labels[fashion.test_labels < 3])


def test_normalisation_uses_the_training_statistics_for_both_sets(fashion):
    pixels, some = fashion.train_images.double() / 255, fashion.test_images[:50]
    mean, std = pixels.mean(), pixels.std(correction=0)
    assert (fashion.mean.item(), fashion.std.item()) == pytest.approx((mean.item(), std.item()), abs=1e-6)
    test = (some.double() / 255 - mean) / std
    torch.testing.assert_close(fashion.normalise(some).double(), test, atol=1e-5, rtol=1e-5)
    mean, std = pixel_statistics(torch.full((3, 1, 2, 2), 51, dtype=torch.uint8))
    assert mean.item() == pytest.approx(0.2) and std.item() == 1.0  # a constant channel becomes 0


def test_sizes_and_channels():
    few = partial(load, "fashion_mnist", train_per_class=2, test_per_class=1)
    plain, padded = few(), few(image_size=32, channels=3)
    assert padded.train_images.shape == (20, 3, 32, 32)
    assert torch.equal(padded.train_images[:, 2, 2:30, 2:30], plain.train_images[:, 0])
    assert padded.train_images[:, :, :2].sum() == 0 and padded.mean[0] < plain.mean[0]
    for size, settings in ((14, {}), (56, {"fit": "resize"})):
        images = few(image_size=size, **settings).train_images
        assert images.shape[-1] == size
        assert abs(images.float().mean() - plain.train_images.float().mean()) < 2


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def refused(words, name, folder=None, **settings):
    """`load` ends in one line with these words."""
    with pytest.raises(UserError, match=words) as caught:
        load(name, folder, **settings)
    assert "\n" not in str(caught.value)
    str(caught.value).encode()  # can be written into a file, also where a name is not UTF-8


def test_full_fashion_mnist_from_files_put_into_the_data_folder(tmp_path, monkeypatch):
    name = "fashion_mnist_full"
    pictures = np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    labels, raw = (np.arange(30) % 10).astype(np.uint8), tmp_path / name / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 30), ("t10k", 10)):
        for kind, array in (("images-idx3", pictures[:count]), ("labels-idx1", labels[:count])):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            (raw / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    known = [(file.name, md5(file)) for file in raw.iterdir()]
    monkeypatch.setattr(import_torchvision().datasets.FashionMNIST, "resources", known)
    images = load(name, root=tmp_path)
    assert np.array_equal(images.train_images[:, 0].numpy(), pictures)
    assert images.test_labels.tolist() == labels[:10].tolist() and images.classes == 10
    assert torch.equal(load(name, raw.parents[1]).train_images, images.train_images)
    unpacked = raw / "t10k-labels-idx1-ubyte"
    unpacked.write_bytes(unpacked.read_bytes()[:-3])
    refused(f"does not hold {name}", name, raw.parents[1])
    refused(f"{name} cannot be had .* delete {raw.parents[1]}", name, root=tmp_path)


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_as_published(tmp_path, monkeypatch, classes):
    theirs = getattr(import_torchvision().datasets, f"CIFAR{classes}")
    inner, pictures = tmp_path / theirs.base_folder, []
    inner.mkdir()
    for part in ("train_list", "test_list"):
        for name, _ in getattr(theirs, part):
            drawn = np.random.default_rng(len(pictures)).integers(0, 256, (classes, 3072), dtype=np.uint8)
            pictures.append(drawn)
            content = {"data": drawn, "labels" if classes == 10 else "fine_labels": [*range(classes)]}
            (inner / name).write_bytes(pickle.dumps(content, protocol=2))
        monkeypatch.setattr(theirs, part, [[name, md5(inner / name)] for name, _ in getattr(theirs, part)])
    meta = inner / theirs.meta["filename"]
    meta.write_bytes(pickle.dumps({theirs.meta["key"]: [f"class {i}" for i in range(classes)]}, protocol=2))
    monkeypatch.setattr(theirs, "meta", theirs.meta | {"md5": md5(meta)})
    *train, test = pictures
    images = load(f"cifar{classes}", tmp_path)
    assert np.array_equal(images.train_images.flatten(1).numpy(), np.concatenate(train))
    assert images.train_images.shape[1:] == (3, 32, 32)
    assert images.train_labels.tolist() == list(range(classes)) * len(train)
    assert np.array_equal(images.test_images.flatten(1).numpy(), test) and images.classes == classes


def write_tiny_imagenet(folder, monkeypatch):
    """Tiny ImageNet of two classes as published, with unlabelled test pictures."""
    monkeypatch.setitem(vision_data.AS_CLASS_FOLDERS, "tiny_imagenet", (2, 64))
    root = folder / "tiny-imagenet-200"
    for part in ("train/n01/images", "train/n02/images", "val/images", "test/images"):
        (root / part).mkdir(parents=True)
    for label, name in enumerate(["n02", "n01"]):
        for i in range(3):
            Image.new("RGB", (64, 64), (100 * label, i, 0)).save(root / f"train/{name}/images/{i}.png")
        Image.new("L", (64, 64), 9).save(root / f"val/images/val_{label}.png")  # some of them are grey
    told = "val_0.png\tn02\t0\t0\t62\t62\nval_1.png\tn01\t0\t0\t62\t62\n"
    (root / "val" / "val_annotations.txt").write_text(told)
    Image.new("RGB", (64, 64)).save(root / "test/images/test_0.png")
    return root


def test_tiny_imagenet_from_a_folder(tmp_path, monkeypatch):
    root = write_tiny_imagenet(tmp_path, monkeypatch)
    for folder in (tmp_path, root):
        images = load("tiny_imagenet", folder, root=tmp_path / "data")
        assert images.classes == 2 and images.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
        assert images.train_images[:, 0, 0, 0].tolist() == [100, 100, 100, 0, 0, 0]
        assert images.test_labels.tolist() == [1, 0] and images.test_images.unique().tolist() == [9]
    shutil.rmtree(root / "val" / "images")
    for value, inner in ((7, "n02/images"), (6, "n01")):
        (place := root / "val" / inner).mkdir(parents=True)
        Image.new("RGB", (64, 64), (value, 0, 0)).save(place / "moved.png")
    images = load("tiny_imagenet", tmp_path, root=tmp_path / "data")
    assert images.test_labels.tolist() == [0, 1] and images.test_images[:, 0, 0, 0].tolist() == [6, 7]


def folder_of_pictures(root, **values):
    """Three training pictures and one test picture of each class, whose first channel has the value of its class."""
    for split, count in (("train", 3), ("test", 1)):
        for name, value in (values or {"cat": 10, "dog": 200}).items():
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                picture = Image.new("RGB", (40, 30 + i), (value, i, split == "test"))
                picture.save(root / split / name / f"{i}.png")
    return root


def test_image_folder_of_any_size(tmp_path):
    folder = folder_of_pictures(tmp_path / "pets")
    Image.new("RGBA", (9, 50), (10, 0, 0, 128)).save(folder / "train" / "cat" / "tall.png")
    images = load("image_folder", folder, root=tmp_path / "data", image_size=16)
    assert images.train_images.shape == (7, 3, 16, 16) and images.classes == 2
    assert images.train_images[:, 0, 8, 8].tolist() == [10] * 4 + [200] * 3
    assert images.test_labels.tolist() == [0, 1]


def test_class_folders_are_decoded_once_and_again_when_files_change(tmp_path, monkeypatch):
    folder = folder_of_pictures(tmp_path / "pets")
    settings = {"image_size": 8, "channels": 1, "cache": tmp_path / "cache"}
    first, _ = read_class_folders(folder, **settings).train
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", lambda *_, **__: pytest.fail("decoded again"))
        assert torch.equal(first, read_class_folders(folder, **settings).train[0])
        moved = folder.rename(tmp_path / "moved")
        assert torch.equal(first, read_class_folders(moved, **settings).train[0])
    Image.new("RGB", (30, 30), (77, 77, 77)).save(moved / "train" / "cat" / "0.png")
    changed, _ = read_class_folders(moved, **settings).train
    assert changed[0, 0, 0, 0] == 77 and first[0, 0, 0, 0] != 77


def test_a_published_data_set_as_class_folders_keeps_its_name_and_size(tmp_path):
    folder = folder_of_pictures(tmp_path / "images", **{f"class_{n}": 20 * n for n in range(10)})
    images = load("cifar10", folder, root=tmp_path)
    assert (images.name, images.classes, images.test_images.shape) == ("cifar10", 10, (10, 3, 32, 32))
    assert images.train_labels.tolist() == sorted([*range(10)] * 3)
    assert images.train_images[:, 0, 0, 0].tolist() == [20 * n for n in images.train_labels.tolist()]
    assert images.test_images[:, 2].unique().tolist() == [1]
    small = load("cifar10", folder, root=tmp_path, image_size=16, train_per_class=1)
    assert small.train_images.shape == (10, 3, 16, 16)
    assert len(list((tmp_path / "decoded").glob("*.pt"))) == 1  # all sizes share one decoded copy
    fewer = folder_of_pictures(tmp_path / "fewer")
    refused("has 2 classes in train, cifar10 has 10: use data=image_folder", "cifar10", fewer)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n"
HOSTILE = {  # what is said of a file, and how it is written
    "cannot be decoded": lambda path: path.write_bytes(POSTSCRIPT),
    "cannot be decoded .*exceeds limit": lambda path: Image.new("1", (13_000, 13_000)).save(path, "PNG"),
    "more than 8 bits a channel": lambda path: Image.new("I;16", (8, 8), 40 * 256).save(path, "PNG"),
}


@pytest.mark.parametrize("words", HOSTILE)
def test_hostile_pictures_are_one_line(tmp_path, monkeypatch, words):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a program was started"))
    folder = folder_of_pictures(tmp_path / "pets")
    HOSTILE[words](folder / "train" / "cat" / os.fsdecode(b"caf\xe9.jpg"))
    refused(words, "image_folder", folder, root=tmp_path, image_size=8)
    assert not list((tmp_path / "decoded").glob("*.pt"))


@pytest.fixture
def server(tmp_path):
    """The address of `tmp_path` on a web server."""
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()


def test_tiny_imagenet_is_fetched_and_unpacked_once_and_damage_is_one_line(server, tmp_path, monkeypatch):
    original, place = write_tiny_imagenet(tmp_path / "original", monkeypatch), tmp_path / "tiny_imagenet"
    served = Path(shutil.make_archive(tmp_path / "tiny-imagenet-200", "zip", original.parent))
    whole, archive, asked, urlopen = served.read_bytes(), place / served.name, [], urllib.request.urlopen
    monkeypatch.setattr(urllib.request, "urlopen", lambda *a, **k: (asked.append(1), urlopen(*a, **k))[1])
    monkeypatch.setattr(vision_data, "TINY_IMAGENET", f"{server}{served.name}")
    inside = whole.index(b"/val_annotations.txt") + len("/val_annotations.txt")
    for content in (b"no archive", whole[:inside] + b"\xff" * 8 + whole[inside + 8 :], whole):
        served.write_bytes(content)
        monkeypatch.setattr(vision_data, "TINY_IMAGENET_MD5", md5(served))
        if content != whole:
            refused(r"tiny_imagenet cannot be had .* data\.folder=FOLDER", "tiny_imagenet", root=tmp_path)
            assert sorted(path.name for path in place.iterdir()) == [".lock", archive.name]
    found = [load("tiny_imagenet", root=tmp_path)]  # which replaces the damaged archive
    shutil.rmtree(place)
    asked.clear()
    with ThreadPoolExecutor(4) as pool:
        found += pool.map(lambda _: load("tiny_imagenet", root=tmp_path), range(4))
    archive.unlink()
    found.append(load("tiny_imagenet", root=tmp_path))
    assert len(asked) == 2  # for redirections, and for the file
    assert len(found) == 6 and all(torch.equal(i.train_images, found[0].train_images) for i in found)


def numbers(count=200, classes=10):
    """A data set whose pictures are their own index."""
    index = torch.arange(count)
    pixels = torch.stack([index // 256, index % 256, index * 0, index * 0 + 1], 1)
    both = [pixels.view(-1, 1, 2, 2).to(torch.uint8), index % classes] * 2
    return Images("numbers", *both, classes, torch.zeros(1), torch.ones(1))


def test_ten_classes_in_four_stages_show_all_among_their_first_images():
    """Plasticity is measured on those, and a data set may hold its images class by class."""
    images = replace(numbers(), train_labels=torch.arange(10).repeat_interleave(20))
    phases = make_phases("class_incremental", images, 1, stages=4)
    assert set(phases[-1].labels[:80].tolist()) == set(range(10))
    assert [len(p.seen) for p in phases] == [3, 6, 8, 10]


def test_replay_keeps_the_same_share_of_every_old_class():
    make = partial(make_phases, "class_incremental", numbers(), 1, stages=5)
    whole, everything = make(), make(replay=1.0)
    for before, after in pairwise(make(replay=0.25)):
        assert set(after.seen.tolist()) == set(before.seen.tolist()) | set(after.new.tolist())
        old, counts = torch.isin(after.labels, before.seen), torch.bincount(after.labels, minlength=10)
        assert set(counts[before.seen].tolist()) == {5} and set(counts[after.new].tolist()) == {20}
        assert set(after.indices[old].tolist()) <= set(before.indices.tolist())
    assert all(torch.equal(p.labels.unique(), p.new) for p in make(replay=0.0))
    assert all(torch.equal(a.indices, b.indices) for a, b in zip(everything, whole, strict=True))
    assert whole[1].new is None


def test_replay_in_continual_keeps_the_same_share_of_every_earlier_stage():
    make = partial(make_phases, "continual", numbers(), 1, stages=4)
    whole, phases, everything = make(), make(replay=0.1), make(replay=1.0)
    assert [len(p) for p in phases] == [50, 55, 60, 65]
    sets = [set(phase.indices.tolist()) for phase in phases]
    fresh = [set(b.indices.tolist()) - set(a.indices.tolist()) for a, b in pairwise(whole)]
    for (before, after), new in zip(pairwise(sets), fresh, strict=True):
        assert new < after and after - new < before
    assert all(torch.equal(a.indices, b.indices) for a, b in zip(everything, whole, strict=True))


def test_random_labels_are_fresh_on_fresh_images():
    images = numbers()
    tasks = make_phases("random_label", images, 1, tasks=5, count=50, epochs=2)
    assert len(torch.cat([t.indices for t in tasks[:4]]).unique()) == 200  # none twice before all came once
    assert not torch.equal(tasks[4].indices, tasks[0].indices)  # then another shuffle begins
    assert all(len(t.indices.unique()) == 50 for t in tasks)
    agreement = torch.cat([t.labels == images.train_labels[t.indices] for t in tasks]).float()
    assert agreement.mean() < 0.25 and not torch.equal(tasks[0].labels, tasks[1].labels)


def test_label_noise_then_truth():
    images = numbers()
    noise, truth = make_phases("label_noise", images, 1, noisy=100, clean=150, epochs=[3, 2])
    assert (len(noise), noise.epochs, len(truth), truth.epochs) == (100, 3, 150, 2)
    assert torch.equal(truth.labels, images.train_labels[truth.indices])
    assert (noise.labels == images.train_labels[noise.indices]).float().mean() < 0.3
    assert set(noise.indices.tolist()) <= set(truth.indices.tolist())


def test_permuted_moves_pixels_alike_in_training_and_test():
    images, index = numbers(), torch.tensor([7, 9])
    phases = make_phases("permuted", images, 4, tasks=2, count=50)
    for phase in phases:
        train, test = (make_inputs(images, phase, index, test=test) for test in (False, True))
        assert torch.equal(train, test)
        expected = images.normalise(images.train_images[index]).flatten(2)[..., phase.permutation]
        assert torch.equal(train.flatten(2), expected)
    assert not torch.equal(*(phase.permutation for phase in phases))


def test_batches_are_a_pure_function_and_cover_everything():
    batches = batch_indices(1, 2, 3, 103, 25)
    assert [len(b) for b in batches] == [25, 25, 25, 25, 3]
    assert sorted(torch.cat(batches).tolist()) == list(range(103))
    assert all(map(torch.equal, batches, batch_indices(1, 2, 3, 103, 25)))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(batches[0], batch_indices(*other, 103, 25)[0])
    assert [len(b) for b in batch_indices(1, 0, 0, 51, 25)] == [25, 26]  # no batch of one picture
    assert [len(b) for b in batch_indices(1, 0, 0, 1, 25)] == [1]


def test_a_gradual_shift_mixes_in_the_phase_before():
    old = PhaseData(0, "old", torch.arange(10), torch.zeros(10, dtype=torch.int64), 4)
    new = PhaseData(1, "new", torch.arange(100, 140), torch.ones(40, dtype=torch.int64), 4)
    batch, shares = torch.arange(20, 40), []
    for done in (0.0, 0.25, 0.4, 0.5, 0.9):
        indices, labels = pick([old, new], new, batch, done, 0.5)
        own = indices >= 100
        assert len(indices) == len(labels) == 20 and torch.equal(own, labels == 1)
        assert torch.equal(indices[own], new.indices[batch][own])
        shares.append(float(own.float().mean()))
    assert shares == pytest.approx([0.0, 0.5, 0.8, 1.0, 1.0])
    assert torch.equal(pick([old, new], new, batch, 0.0, 0.0)[0], new.indices[batch])
    assert torch.equal(pick([old, new], old, torch.arange(5), 0.0, 0.5)[0], torch.arange(5))
