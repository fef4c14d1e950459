"""Prepare token files from text: `<out>/<name>-<tokenizer>/{train,validation}.bin` and a manifest.

    python language/prepare.py                                       # the two shipped corpora, small tokenizer
    python language/prepare.py wikitext103 openwebtext --tokenizer gpt2
    python language/prepare.py folder:/my/texts jsonl:/my/texts.jsonl.xz --tokenizer gpt2 --split split

Files are flat arrays of token ids (uint16 if the vocabulary allows, else uint32); every document ends with the
tokenizer's end-of-text id. The manifest has source, split, tokenizer, counts and SHA-256; a folder that was prepared
with other settings is refused. The same command resumes a stopped preparation, whose finished pieces are in
`.pieces_...`. The tokenizer uses all cores, or as many as RAYON_NUM_THREADS says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere

import numpy as np
from tqdm import tqdm

from fire_core.errors import UserError, print_error
from fire_core.files import write_atomic, written_aside
from harness.runs.folders import FolderLock, fingerprint
from language.data import PARTS, read_manifest
from language.sources import PUBLISHED_TOKENS, SHIPPED, Source, open_source
from language.text_tokenizer import TextTokenizer, load_tokenizer, tokenizer_sha256

PIECE_CHARACTERS = 2_000_000  # size of a piece of text, the unit of resuming


def folder_name(source: str, tokenizer: str, documents: int | None = None) -> str:
    """Return the name of the prepared folder, e.g. encyclopaedic-small; a limit on documents is part of it."""
    name = f"{source}-{Path(tokenizer).stem}"
    return f"{name}-{documents}" if documents else name


def prepare(
    source: Source,
    tokenizer_name: str,
    out: Path,
    *,
    documents: int | None = None,
    progress: bool = True,
) -> Path:
    """Write the token files of one source, unless they exist, and return their folder.

    documents: use only this many documents of each part, the first ones. Raises UserError if a part has no document, or
    if the folder has tokens of another path, split or tokenizer; whether the text has changed is not looked at.
    """
    folder = out / folder_name(source.name, tokenizer_name, documents)
    made_from = origin(source, tokenizer_name, documents)
    if not (folder / "manifest.json").is_file():
        _check_documents(source)
        with FolderLock(folder):  # runs of a sweep may ask for the same corpus at the same time
            if not (folder / "manifest.json").is_file():
                _prepare(source, tokenizer_name, folder, made_from, progress)
    _check_origin(folder, made_from)
    return folder


def origin(source: Source, tokenizer_name: str, documents: int | None) -> dict[str, Any]:
    """Return everything that determines the tokens, for the manifest."""
    return {
        "source": source.description,
        "validation_share": source.validation_share,
        "field": source.field,
        "split": source.split,
        "documents": documents,
        "tokenizer_sha256": tokenizer_sha256(tokenizer_name),
    }


def _check_documents(source: Source) -> None:
    """Raise UserError for a source without a document for each part, before anything is written."""
    for part in PARTS:
        if next(iter(source.documents(part)), None) is None:
            share = source.validation_share
            told = "" if share is None or source.split else f" (--validation-share {share})"
            raise UserError(
                f"{source.description} has no {part} document{told}: give more text or another split"
            )


def _check_origin(folder: Path, wanted: dict[str, Any]) -> None:
    """Raise UserError for a folder with another origin."""
    known = read_manifest(folder).get("made_from", {})
    for key, value in wanted.items():
        if known.get(key, value) != value:
            raise UserError(
                f"{folder} was made with {key}={known[key]}, not {value}: remove the folder, or give another --out"
            )


def _prepare(
    source: Source, tokenizer_name: str, folder: Path, made_from: dict[str, Any], progress: bool
) -> None:
    tokenizer = load_tokenizer(tokenizer_name)
    dtype = "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"
    pieces = folder / f".pieces_{fingerprint(made_from | {'characters': PIECE_CHARACTERS})}"
    for old in folder.glob(".pieces*"):
        if old != pieces:
            shutil.rmtree(old)
    pieces.mkdir(exist_ok=True)
    parts = {}
    for part in PARTS:
        texts = islice(source.documents(part), made_from["documents"])
        bar = tqdm(_group(texts), f"{folder.name}/{part}", unit=" pieces", disable=None if progress else True)
        paths = []
        for number, group in enumerate(bar):
            paths.append(pieces / f"{part}_{number:06d}.bin")
            if not paths[-1].is_file():
                encode_piece(group, tokenizer, dtype, paths[-1])
        parts[part] = _join(paths, folder / f"{part}.bin", np.dtype(dtype), tokenizer.end_of_text)
    manifest = {
        "name": source.name,
        "source": source.description,
        "tokenizer": {
            "name": tokenizer.name,
            "vocabulary": tokenizer.vocabulary,
            "end_of_text": tokenizer.end_of_text,
        },
        "made_from": made_from,
        "dtype": dtype,
        "parts": parts,
    }
    if source.answer:
        ids = tokenizer.encode_batch([source.answer])[0]
        if len(ids) != 1:
            raise UserError(
                f"tokenizer {tokenizer.name} has no token of its own for {source.answer!r}: use another for {source.name}"
            )
        manifest["answer"] = int(ids[0])
    write_atomic(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    for old in folder.glob(".pieces*"):
        shutil.rmtree(old)


def _group(texts: Iterable[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= PIECE_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_piece(texts: list[str], tokenizer: TextTokenizer, dtype: str, path: Path) -> None:
    """Write the token ids of some documents, each followed by the end-of-text id, to one file, atomically."""
    ids = [
        np.array([*document, tokenizer.end_of_text], dtype=dtype)
        for document in tokenizer.encode_batch(texts)
    ]
    with written_aside(path) as aside:
        np.concatenate(ids).tofile(aside)


def _join(pieces: list[Path], path: Path, dtype: np.dtype, end_of_text: int) -> dict[str, Any]:
    """Concatenate the pieces in `path` and return counts and SHA-256 for the manifest."""
    digest, tokens, documents = hashlib.sha256(), 0, 0
    with path.open("wb") as out:
        for piece in pieces:
            raw = piece.read_bytes()
            ids = np.frombuffer(raw, dtype)
            out.write(raw)
            digest.update(raw)
            tokens += len(ids)
            documents += int((ids == end_of_text).sum())
    return {"tokens": tokens, "documents": documents, "sha256": digest.hexdigest()}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and print the folder and token counts of each source."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="*", default=list(SHIPPED), help="names, folder:PATH or jsonl:PATH")
    parser.add_argument("--tokenizer", default="small", help="small, gpt2, or a tokenizers JSON file")
    parser.add_argument("--out", type=Path, default=Path("data/language"))
    parser.add_argument("--documents", type=int, help="only the first so many documents of each part")
    parser.add_argument("--validation-share", type=float, default=0.05, help="for folders and JSONL")
    parser.add_argument("--field", default="text", help="JSONL: the field that holds the text")
    parser.add_argument("--split", help="JSONL: the field that says train or validation; replaces the share")
    options = parser.parse_args(arguments)
    if options.documents is not None and options.documents < 1:
        raise UserError(f"--documents {options.documents}: give a number of documents, 1 or more")
    for text in options.sources:
        source = open_source(text, options.validation_share, options.field, options.split)
        folder = prepare(source, options.tokenizer, options.out, documents=options.documents)
        parts = read_manifest(folder)["parts"]
        counts = ", ".join(
            f"{part} {p['tokens']:,} tokens in {p['documents']:,} documents" for part, p in parts.items()
        )
        print(f"{folder}: {counts}", flush=True)
        expected = PUBLISHED_TOKENS.get((source.name, options.tokenizer))
        if expected and options.documents is None and parts["train"]["tokens"] != expected:
            raise UserError(
                f"{folder}/train.bin has {parts['train']['tokens']:,} tokens, {expected:,} were expected: the text, its "
                "split or the tokenizer is not the published one; the files are kept"
            )


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as problem:
        print_error(
            problem
            if isinstance(problem, UserError)
            else f"{problem}: free disk space, or name another folder with --out"
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print_error("interrupted; run the same command again to go on")
        sys.exit(130)
