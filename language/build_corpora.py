"""Make the two shipped corpora and their tokenizer from the Debian packages they come from.

    mkdir packages && cd packages
    apt-get download wordnet-base python3.11-doc
    for package in *.deb; do dpkg-deb -x "$package" unpacked; done
    cd .. && python language/build_corpora.py packages/unpacked

A, `encyclopaedic`: the glosses of WordNet 3.0, one document per synset ("term, term: definition; example").
B, `technical`: the sources of the Python 3.11 documentation, one document per file.

Documents are sorted by the SHA-256 of their name, so any prefix is a fair sample of the corpus. The same hash decides
which documents are validation, so no document is in both parts, and the result depends only on the version of the
packages. Users of the suite need not run this: the result is in `language/assets`.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere

from language.text_tokenizer import END_OF_TEXT, train_small_tokenizer

ASSETS = Path(__file__).resolve().parent / "assets"
DOCUMENT_SEPARATOR = "\n\f\n"
WORDNET_PARTS = ("noun", "verb", "adj", "adv")
PYTHON_SOURCES = "usr/share/doc/python3.11/html/_sources"


def wordnet_documents(unpacked: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for each synset of WordNet; the name is part of speech and offset, as in noun/00001740."""
    for part in WORDNET_PARTS:
        path = unpacked / "usr/share/wordnet" / f"data.{part}"
        for line in _lines(path):
            if line.startswith("  "):  # the licence at the top of each file, kept in assets/licences
                continue
            fields, _, gloss = line.partition(" | ")
            columns = fields.split(" ")
            count = int(columns[3], 16)
            words = [columns[4 + 2 * i].split("(")[0].replace("_", " ") for i in range(count)]
            yield f"{part}/{columns[0]}", f"{', '.join(words)}: {gloss.strip()}"


def python_documents(unpacked: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, text) for each source file of the documentation, without trailing blanks."""
    folder = unpacked / PYTHON_SOURCES
    for path in sorted(folder.rglob("*.rst.txt")):
        yield str(path.relative_to(folder)), "\n".join(_lines(path)).strip()


def _lines(path: Path) -> list[str]:
    return [line.rstrip() for line in path.open(encoding="utf-8")]


def split_documents(
    documents: Iterable[tuple[str, str]], validation_share: float
) -> tuple[list[str], list[str]]:
    """Return training and validation texts, each in the order of the SHA-256 of the names.

    A document is validation if bytes 8 to 15 of that hash, as a number in [0, 1), are below the share.
    """
    hashed = sorted((hashlib.sha256(name.encode()).digest(), text) for name, text in documents)
    threshold = int(validation_share * 2**64)
    validation = [text for digest, text in hashed if int.from_bytes(digest[8:16], "big") < threshold]
    training = [text for digest, text in hashed if int.from_bytes(digest[8:16], "big") >= threshold]
    return training, validation


def write_corpus(name: str, documents: Iterable[tuple[str, str]], share: float, about: dict) -> list[str]:
    """Write `<name>.{train,validation}.txt.xz`, put counts and hashes into `about`, and return all texts."""
    training, validation = split_documents(documents, share)
    for part, texts in (("train", training), ("validation", validation)):
        raw = DOCUMENT_SEPARATOR.join(texts).encode()
        packed = lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)
        path = ASSETS / f"{name}.{part}.txt.xz"
        path.write_bytes(packed)
        about[path.name] = {
            "documents": len(texts),
            "bytes": len(raw),
            "sha256": hashlib.sha256(packed).hexdigest(),
        }
    return training + validation


def main() -> None:
    """Write the corpora, the tokenizer, the manifest and the licences to `language/assets`."""
    [unpacked] = map(Path, sys.argv[1:])
    about: dict = {}
    texts = write_corpus("encyclopaedic", wordnet_documents(unpacked), 0.02, about)
    texts += write_corpus("technical", python_documents(unpacked), 0.05, about)
    tokenizer = train_small_tokenizer(texts, vocabulary=2048)
    tokenizer.save(str(ASSETS / "small_bpe.json"), pretty=False)
    about["small_bpe.json"] = {
        "vocabulary": tokenizer.get_vocab_size(),
        "end_of_text": tokenizer.token_to_id(END_OF_TEXT),
        "sha256": hashlib.sha256((ASSETS / "small_bpe.json").read_bytes()).hexdigest(),
    }
    (ASSETS / "manifest.json").write_text(json.dumps(about, indent=2) + "\n")
    for package, target in (("wordnet-base", "WORDNET.txt"), ("python3.11-doc", "PYTHON.txt")):
        source = unpacked / "usr/share/doc" / package / "copyright"
        (ASSETS / "licences").mkdir(exist_ok=True)
        shutil.copyfile(source, ASSETS / "licences" / target)


if __name__ == "__main__":
    main()
