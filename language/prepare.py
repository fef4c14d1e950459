"""Prepare token files from text: `<out>/<name>-<tokenizer>/{train,validation}.bin` and a manifest.

    python language/prepare.py                                       # the two shipped corpora, small tokenizer
    python language/prepare.py wikitext103 openwebtext --tokenizer gpt2
    python language/prepare.py folder:/my/texts jsonl:/my/texts.jsonl.xz --tokenizer gpt2 --split split

Files are flat arrays of token ids (uint16 if the vocabulary allows, else uint32); every document ends with the tokenizer's
end-of-text id. The tokenizer uses all cores, or as many as RAYON_NUM_THREADS says.
"""

import json
import lzma
import sys
import zlib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere

import numpy as np
from tqdm import tqdm

from fire_core.errors import UserError, clean_exit
from fire_core.files import remove_torn, write_atomic, written_aside
from harness.runs.folders import FolderLock
from language.data import PARTS, read_manifest
from language.sources import PUBLISHED_TOKENS, SHIPPED, Source, open_source
from language.text_tokenizer import TextTokenizer, load_tokenizer, tokenizer_sha256

DOCUMENTS_AT_A_TIME = 256


def folder_name(source: str, tokenizer: str, documents: int | None = None) -> str:
    """Return the name of the prepared folder, e.g. encyclopaedic-small; a limit on documents is part of it."""
    return f"{source}-{Path(tokenizer).stem}" + (f"-{documents}" if documents else "")


def prepare(
    source: Source, tokenizer_name: str, out: Path, *, documents: int | None = None, progress: bool = True
) -> Path:
    """Write the token files of one source, unless they exist, and return their folder.

    documents: use only the first so many of each part. Raises UserError if a part has no document, or if the folder has
    tokens of another path, split or tokenizer; whether the text has changed is not looked at.
    """
    folder = out / folder_name(source.name, tokenizer_name, documents)
    made_from = source.origin | {"documents": documents, "tokenizer_sha256": tokenizer_sha256(tokenizer_name)}
    if not (folder / "manifest.json").is_file():
        with FolderLock(folder):  # runs of a sweep may ask for the same corpus at the same time
            if not (folder / "manifest.json").is_file():
                _write(source, load_tokenizer(tokenizer_name), folder, made_from, progress)
    known = read_manifest(folder)["made_from"]
    for key, value in made_from.items():
        if known.get(key) != value:
            wrong = f"{folder} was made with {key}={known.get(key)}, not {value}"
            raise UserError(f"{wrong}: remove the folder, or give another --out")
    return folder


def _write(
    source: Source, tokenizer: TextTokenizer, folder: Path, made_from: dict[str, Any], progress: bool
) -> None:
    remove_torn(folder)
    dtype = "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"
    known = {key: getattr(tokenizer, key) for key in ("name", "vocabulary", "end_of_text")}
    manifest: dict[str, Any] = {"name": source.name, "source": made_from["source"], "tokenizer": known}
    manifest |= {"made_from": made_from, "dtype": dtype, "parts": {}}
    if source.answer:
        [manifest["answer"]] = tokenizer.encode_batch([source.answer])[0]
    for part in PARTS:
        texts = islice(source.documents(part), made_from["documents"])
        bar = tqdm(texts, f"{folder.name}/{part}", unit=" documents", disable=None if progress else True)
        manifest["parts"][part] = counts = encode(bar, tokenizer, dtype, folder / f"{part}.bin")
        if not counts["documents"]:
            raise UserError(f"{made_from['source']} has no {part} document: give more text or another split")
    write_atomic(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def encode(texts: Iterable[str], tokenizer: TextTokenizer, dtype: str, path: Path) -> dict[str, int]:
    """Write the token ids of all documents to one file, and return the numbers of both for the manifest."""
    tokens, documents, texts = 0, 0, iter(texts)
    with written_aside(path) as aside, aside.open("wb") as file:
        while together := list(islice(texts, DOCUMENTS_AT_A_TIME)):
            for ids in tokenizer.encode_batch(together):
                file.write(np.array([*ids, tokenizer.end_of_text], dtype).tobytes())
                tokens += len(ids) + 1
            documents += len(together)
    return {"tokens": tokens, "documents": documents}


def main() -> None:
    """Run the command line and print the folder and token counts of each source."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", default=list(SHIPPED), help="names, folder:PATH or jsonl:FILE")
    parser.add_argument("--tokenizer", default="small", help="small, gpt2, or a tokenizers JSON file")
    parser.add_argument("--out", type=Path, default=Path("data/language"))
    parser.add_argument("--documents", type=int, help="only the first so many documents of each part")
    parser.add_argument("--validation-share", type=float, default=0.05, help="for folders and JSONL")
    parser.add_argument("--field", default="text", help="JSONL: the field that holds the text")
    parser.add_argument("--split", help="JSONL: the field that says train or validation; replaces the share")
    options = parser.parse_args()
    for text in options.sources:
        source = open_source(text, options.validation_share, options.field, options.split)
        folder = prepare(source, options.tokenizer, options.out, documents=options.documents)
        parts = read_manifest(folder)["parts"]
        for name, part in parts.items():
            counts = f"{part['tokens']:,} tokens in {part['documents']:,} documents"
            print(f"{folder}/{name}.bin: {counts}", flush=True)
        expected = PUBLISHED_TOKENS.get((source.name, options.tokenizer))
        if expected and options.documents is None and parts["train"]["tokens"] != expected:
            wrong = f"{folder}/train.bin has {parts['train']['tokens']:,} tokens, {expected:,} were expected"
            raise UserError(f"{wrong}: the text, its split or the tokenizer is another; the files are kept")


if __name__ == "__main__":
    with clean_exit():
        try:
            main()
        except (EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as problem:
            raise UserError(str(problem)) from problem
