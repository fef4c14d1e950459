"""Data sets, readers of foreign files, downloads, and the phases of every protocol."""

import gzip
import hashlib
import http.server
import os
import pickle
import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from fire_core import UserError
from vision import data as vision_data
from vision.data import ASSETS, DATA_SETS, Images, batch_indices, load, make_phases, pixel_statistics, prepare
from vision.download import fetch
from vision.readers import read_batch, read_idx, read_image_folder


@pytest.fixture(scope="module")
def fashion():
    return load("fashion_mnist")


# ------------------------------------------------------------------------------------------- what ships
def test_shipped_subset_is_balanced_small_and_licensed(fashion):
    assert fashion.train_images.shape == (10_000, 1, 28, 28) and fashion.test_images.shape == (
        2_000,
        1,
        28,
        28,
    )
    assert fashion.train_labels.bincount().tolist() == [1000] * 10
    assert fashion.test_labels.bincount().tolist() == [200] * 10
    assert (ASSETS / "fashion_mnist_subset.npz").stat().st_size < 5_000_000
    assert "MIT License" in (ASSETS / "LICENSE-fashion-mnist.txt").read_text()
    assert not set(map(hash_of, fashion.train_images)) & set(map(hash_of, fashion.test_images))


def hash_of(image):
    return hashlib.sha256(image.numpy().tobytes()).digest()


def test_normalisation_uses_the_training_statistics_for_both_sets(fashion):
    pixels = fashion.train_images.double() / 255
    torch.testing.assert_close(fashion.mean[0].double(), pixels.mean(), atol=1e-6, rtol=0)
    torch.testing.assert_close(fashion.std[0].double(), pixels.std(correction=0), atol=1e-6, rtol=0)
    test = (fashion.test_images[:50].double() / 255 - pixels.mean()) / pixels.std(correction=0)
    torch.testing.assert_close(
        fashion.normalise(fashion.test_images[:50]).double(), test, atol=1e-5, rtol=1e-5
    )


def test_constant_channel_becomes_zero():
    mean, std = pixel_statistics(torch.full((3, 1, 2, 2), 51, dtype=torch.uint8))
    assert mean.item() == pytest.approx(0.2) and std.item() == 1.0


def test_sizes_and_channels():
    plain = load("fashion_mnist", train_per_class=2, test_per_class=1)
    padded = load("fashion_mnist", train_per_class=2, test_per_class=1, image_size=32, channels=3)
    assert padded.train_images.shape == (20, 3, 32, 32)
    assert torch.equal(padded.train_images[:, 2, 2:30, 2:30], plain.train_images[:, 0])
    assert padded.train_images[:, :, :2].sum() == 0
    assert padded.mean[0] < plain.mean[0]
    small = load("fashion_mnist", train_per_class=2, test_per_class=1, image_size=14)
    average = plain.train_images.float().mean()
    assert small.train_images.shape[-1] == 14 and abs(small.train_images.float().mean() - average) < 2
    large = load("fashion_mnist", train_per_class=2, test_per_class=1, image_size=56, fit="resize")
    assert abs(large.train_images.float().mean() - average) < 2


# ---------------------------------------------------------------------------------------------- readers
def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    raw = header + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def test_full_fashion_mnist_from_a_folder(tmp_path):
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (30, 28, 28), dtype=np.uint8)
    labels = (np.arange(30) % 10).astype(np.uint8)
    (tmp_path / "raw").mkdir()
    write_idx(tmp_path / "raw" / "train-images-idx3-ubyte.gz", pictures)
    write_idx(tmp_path / "raw" / "train-labels-idx1-ubyte.gz", labels)
    write_idx(tmp_path / "t10k-images-idx3-ubyte", pictures[:10])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", labels[:10])
    images = load("fashion_mnist_full", tmp_path)
    assert np.array_equal(images.train_images[:, 0].numpy(), pictures)
    assert images.test_labels.tolist() == labels[:10].tolist() and images.classes == 10
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes((tmp_path / "t10k-labels-idx1-ubyte").read_bytes()[:-3])
    with pytest.raises(UserError, match="cut short"):
        load("fashion_mnist_full", tmp_path)
    (tmp_path / "x").write_bytes(b"hello")
    with pytest.raises(UserError, match="no IDX file"):
        read_idx(tmp_path / "x")


def cifar_rows(count, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), rng.integers(0, 10, count)


@pytest.mark.parametrize("form", ["python", "binary"])
def test_cifar10_from_a_folder(tmp_path, form):
    parts = [cifar_rows(4, seed) for seed in range(6)]
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    folder = tmp_path / "somewhere"
    folder.mkdir()
    for name, (rows, labels) in zip(names, parts, strict=True):
        if form == "python":
            batch = {b"data": rows, b"labels": labels.tolist(), b"filenames": [b"x.png"] * 4}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        else:
            stacked = np.concatenate([labels.astype(np.uint8)[:, None], rows], axis=1)
            (folder / f"{name}.bin").write_bytes(stacked.tobytes())
    images = load("cifar10", tmp_path)
    expected = np.concatenate([rows for rows, _ in parts[:5]]).reshape(-1, 3, 32, 32)
    assert np.array_equal(images.train_images.numpy(), expected)
    assert images.train_labels.tolist() == np.concatenate([labels for _, labels in parts[:5]]).tolist()
    assert np.array_equal(images.test_images.flatten(1).numpy(), parts[5][0]) and images.classes == 10


def test_cifar100_takes_fine_labels(tmp_path):
    for name in ("train", "test"):
        rows, _ = cifar_rows(5, 1)
        batch = {b"data": rows, b"coarse_labels": [0] * 5, b"fine_labels": [3, 99, 0, 7, 7]}
        (tmp_path / name).write_bytes(pickle.dumps(batch, protocol=2))
    images = load("cifar100", tmp_path)
    assert images.train_labels.tolist() == [3, 99, 0, 7, 7] and images.classes == 100


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


def test_pickles_cannot_run_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Attack()}, protocol=2))
    with pytest.raises(UserError, match="wants to load"):
        read_batch(tmp_path / "data_batch_1")
    assert not (tmp_path / "attacked").exists()
    (tmp_path / "junk").write_bytes(b"\x80\x02junk")
    with pytest.raises(UserError, match="no CIFAR batch"):
        read_batch(tmp_path / "junk")


def test_tiny_imagenet_from_a_folder(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    for label, name in enumerate(["n02", "n01"]):
        (root / "train" / name / "images").mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (64, 64), (100 * label, i, 0)).save(
                root / "train" / name / "images" / f"{i}.png"
            )
    (root / "val" / "images").mkdir(parents=True)
    Image.new("L", (64, 64), 9).save(root / "val" / "images" / "val_0.png")  # some of them are grey
    (root / "val" / "val_annotations.txt").write_text("val_0.png\tn02\t0\t0\t62\t62\n")
    (root / "wnids.txt").write_text("n02\nn01\n")
    images = load("tiny_imagenet", tmp_path, root=tmp_path / "data")
    assert images.class_names == ("n01", "n02") and images.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert images.train_images[:, 0, 0, 0].tolist() == [100, 100, 100, 0, 0, 0]
    assert images.test_labels.tolist() == [1] and images.test_images.unique().tolist() == [9]


def folder_of_pictures(root):
    for split, count in (("train", 3), ("test", 1)):
        for value, name in ((10, "cat"), (200, "dog")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                size = (40, 30 + i)
                Image.new("RGB", size, (value, i, 0)).save(root / split / name / f"{i}.png")
    return root


def test_image_folder_of_any_size(tmp_path):
    folder = folder_of_pictures(tmp_path / "pets")
    Image.new("RGBA", (9, 50), (10, 0, 0, 128)).save(folder / "train" / "cat" / "tall.png")
    images = load("image_folder", folder, root=tmp_path / "data", image_size=16)
    assert images.train_images.shape == (7, 3, 16, 16) and images.class_names == ("cat", "dog")
    assert images.train_images[:, 0, 8, 8].tolist() == [10] * 4 + [200] * 3
    assert images.test_labels.tolist() == [0, 1]


def test_image_folder_is_decoded_once_and_again_when_files_change(tmp_path, monkeypatch):
    folder = folder_of_pictures(tmp_path / "pets")
    cache = tmp_path / "cache"
    first = read_image_folder(folder, image_size=8, channels=1, cache=cache)
    monkeypatch.setattr(Image, "open", lambda *_: pytest.fail("decoded again"))
    again = read_image_folder(folder, image_size=8, channels=1, cache=cache)
    assert np.array_equal(first.train_images, again.train_images)
    monkeypatch.undo()
    Image.new("RGB", (30, 30), (77, 77, 77)).save(folder / "train" / "cat" / "0.png")
    changed = read_image_folder(folder, image_size=8, channels=1, cache=cache)
    assert changed.train_images[0, 0, 0, 0] == 77 and first.train_images[0, 0, 0, 0] != 77


def test_broken_folders_say_what_is_wrong(tmp_path):
    folder = folder_of_pictures(tmp_path / "pets")
    (folder / "train" / "cat" / "0.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"0\.png is no readable image"):
        load("image_folder", folder, root=tmp_path, image_size=16)
    (folder / "train" / "cat" / "0.png").unlink()
    (folder / "test" / "bird").mkdir()
    with pytest.raises(UserError, match="class 'bird'"):
        load("image_folder", folder, root=tmp_path, image_size=16)
    with pytest.raises(UserError, match="must hold train"):
        load("image_folder", folder / "train", root=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"name": "mnist"}, ", ".join(DATA_SETS)),
        ({"name": "cifar10", "folder": "/no/such"}, "/no/such does not exist"),
        ({"name": "cifar10", "folder": "."}, "name the folder with the unpacked CIFAR-10 files"),
        ({"name": "image_folder"}, "data.folder=FOLDER"),
        ({"name": "fashion_mnist", "fit": "crop"}, "pad or resize"),
        ({"name": "fashion_mnist", "channels": 2}, "channels=2"),
        ({"name": "fashion_mnist", "train_per_class": 1001}, "has 1000 images"),
    ],
)
def test_mistakes_say_what_to_do(arguments, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        load(**arguments)
    assert answer in str(error.value) and "\n" not in str(error.value)


# -------------------------------------------------------------------------------------------- downloads
@pytest.fixture
def server(tmp_path):
    """A web server that knows ranges and counts the bytes it sent."""
    content = os.urandom(100_000)

    class Handler(http.server.BaseHTTPRequestHandler):
        sent = 0

        def do_GET(self):
            start = int((self.headers.get("Range") or "bytes=0-").split("=")[1].rstrip("-"))
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            Handler.sent += len(content) - start
            self.wfile.write(content[start:])

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/file", content, Handler
        running.shutdown()


def test_download_resumes_checks_and_happens_once(server, tmp_path):
    url, content, handler = server
    md5 = hashlib.md5(content).hexdigest()
    (tmp_path / "file.part").write_bytes(content[:60_000])
    path = fetch(url, tmp_path / "file", md5)
    assert path.read_bytes() == content and handler.sent == 40_000
    fetch(url, tmp_path / "file", md5)
    assert handler.sent == 40_000 and not (tmp_path / "file.part").exists()


def test_two_runs_that_want_the_same_data_download_it_once(server, tmp_path, monkeypatch):
    url, content, handler = server
    source = [(f"{url}-ubyte.gz", hashlib.md5(content).hexdigest())]
    monkeypatch.setitem(vision_data.SOURCES, "fashion_mnist_full", source)
    folders: list = []

    def want():
        folders.append(vision_data.download("fashion_mnist_full", tmp_path))

    runs = [threading.Thread(target=want) for _ in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert folders == [tmp_path / "fashion_mnist_full"] * 4
    assert handler.sent == len(content)
    assert (folders[0] / "file-ubyte.gz").read_bytes() == content


def test_wrong_download_never_gets_its_name(server, tmp_path):
    url, _, _ = server
    with pytest.raises(UserError, match="has MD5"):
        fetch(url, tmp_path / "file", "0" * 32)
    assert not list(tmp_path.iterdir())


def test_no_connection_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setitem(vision_data.SOURCES, "cifar10", (("http://127.0.0.1:9/cifar.tar.gz", "0" * 32),))
    with pytest.raises(UserError, match=r"data\.folder=FOLDER") as error:
        load("cifar10", root=tmp_path)
    assert str(tmp_path / "cifar10" / "cifar.tar.gz") in str(error.value)


# ------------------------------------------------------------------------------------------------ phases
def numbers(count=200, classes=10):
    """A data set whose pictures are their own index."""
    index = torch.arange(count)
    pictures = (
        torch.stack([index // 256, index % 256, index * 0, index * 0 + 1], 1)
        .view(-1, 1, 2, 2)
        .to(torch.uint8)
    )
    labels = index % classes
    names = tuple(map(str, range(classes)))
    return Images(
        "numbers", pictures, labels, pictures, labels, classes, names, torch.zeros(1), torch.ones(1)
    )


def test_warm_start_is_a_share_and_then_everything():
    images = numbers()
    first, second = make_phases("warm_start", images, 1)
    assert len(first.indices) == 20 and (first.epochs, second.epochs) == (1000, 100)
    assert sorted(second.indices.tolist()) == list(range(200))
    assert set(first.indices.tolist()) <= set(second.indices.tolist())
    assert torch.equal(first.labels, images.train_labels[first.indices])
    again = make_phases("warm_start", images, 1)[0].indices
    assert torch.equal(first.indices, again)
    assert not torch.equal(first.indices, make_phases("warm_start", images, 2)[0].indices)


def test_continual_adds_a_tenth_each_time():
    phases = make_phases("continual", numbers(), 1)
    assert [len(p.indices) for p in phases] == list(range(20, 201, 20))
    for before, after in pairwise(phases):
        assert set(before.indices.tolist()) < set(after.indices.tolist())


def test_class_incremental_shows_all_classes_among_its_first_images():
    """Plasticity is measured on those, and a data set may hold its images class by class."""
    images = replace(numbers(classes=4), train_labels=torch.arange(4).repeat_interleave(50))
    last = make_phases("class_incremental", images, 1, stages=2, epochs=1)[-1]
    assert set(last.labels[:40].tolist()) == {0, 1, 2, 3}
    assert sorted(last.indices.tolist()) == list(range(200))


def test_class_incremental_adds_classes_and_keeps_the_old():
    images = numbers(classes=10)
    phases = make_phases("class_incremental", images, 1, stages=5, epochs=3)
    assert [len(p.seen) for p in phases] == [2, 4, 6, 8, 10]
    for phase in phases:
        assert set(phase.labels.tolist()) == set(phase.seen.tolist())
        assert len(phase.indices) == 20 * len(phase.seen)
    orders = {
        tuple(make_phases("class_incremental", images, s, stages=10)[0].seen.tolist()) for s in range(8)
    }
    assert len(orders) > 1
    uneven = make_phases("class_incremental", images, 1, stages=4)
    assert [len(p.seen) for p in uneven] == [3, 6, 8, 10]


def test_random_labels_are_fresh_on_fresh_images():
    images = numbers()
    tasks = make_phases("random_label", images, 1, tasks=5, count=50, epochs=2)
    seen = torch.cat([t.indices for t in tasks[:4]])
    assert len(seen.unique()) == 200  # none twice before all came once
    assert all(t.measure == "train" and len(t.indices.unique()) == 50 for t in tasks)
    agreement = torch.stack(
        [(t.labels == images.train_labels[t.indices]).float().mean() for t in tasks]
    ).mean()
    assert agreement < 0.25
    assert not torch.equal(tasks[0].labels, tasks[1].labels)


def test_label_noise_then_truth():
    images = numbers()
    noise, truth = make_phases("label_noise", images, 1, noisy=100, clean=150, epochs=[3, 2])
    assert (len(noise.indices), len(truth.indices)) == (100, 150) and (noise.measure, truth.measure) == (
        "train",
        "test",
    )
    assert torch.equal(truth.labels, images.train_labels[truth.indices])
    assert (noise.labels == images.train_labels[noise.indices]).float().mean() < 0.3
    assert set(noise.indices.tolist()) <= set(truth.indices.tolist())


def test_permuted_moves_pixels_alike_in_training_and_test():
    images = numbers()
    one, two = make_phases("permuted", images, 4, tasks=2, count=50)
    for phase in (one, two):
        index = torch.tensor([7, 9])
        train, labels = prepare(images, phase, index)
        test, _ = prepare(images, phase, index, test=True)
        assert torch.equal(train, test) and labels.tolist() == [7, 9]
        expected = (
            images.normalise(images.train_images[index]).flatten(2)[..., phase.permutation].view_as(train)
        )
        assert torch.equal(train, expected)
    assert not torch.equal(one.permutation, two.permutation) or not torch.equal(one.indices, two.indices)


def test_batches_are_a_pure_function_and_cover_everything():
    batches = batch_indices(1, 2, 3, 103, 25)
    assert [len(b) for b in batches] == [25, 25, 25, 25, 3]
    assert sorted(torch.cat(batches).tolist()) == list(range(103))
    assert all(map(torch.equal, batches, batch_indices(1, 2, 3, 103, 25)))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(batches[0], batch_indices(*other, 103, 25)[0])
    assert [len(b) for b in batch_indices(1, 0, 0, 51, 25)] == [25, 26]  # no batch of one picture
    assert [len(b) for b in batch_indices(1, 0, 0, 1, 25)] == [1]


@pytest.mark.parametrize(
    ("name", "settings", "answer"),
    [
        ("warmstart", {}, "warm_start"),
        ("warm_start", {"shares": 0.2}, "share, epochs"),
        ("warm_start", {"share": 0.0}, "share=0.0"),
        ("warm_start", {"epochs": [1, 2, 3]}, r"epochs=\[1, 2, 3\]"),
        ("continual", {"stages": 0}, "stages=0"),
        ("class_incremental", {"stages": 11}, "more than the 10 classes"),
        ("random_label", {"count": 201}, "200 training images"),
        ("label_noise", {"epochs": 0}, "positive"),
    ],
)
def test_impossible_protocols_are_refused(name, settings, answer):
    with pytest.raises(UserError, match=answer):
        make_phases(name, numbers(), 1, **settings)


@pytest.mark.reference
def test_same_tensors_as_torchvisions_transforms(fashion):
    from vision.torchvision_import import import_torchvision

    transforms = import_torchvision().transforms
    mean, std = fashion.mean.tolist(), fashion.std.tolist()
    theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    for index in (0, 5000, 9999):
        picture = Image.fromarray(fashion.train_images[index, 0].numpy())
        ours = fashion.normalise(fashion.train_images[index : index + 1])[0]
        torch.testing.assert_close(ours, theirs(picture), atol=1e-5, rtol=1e-5)
