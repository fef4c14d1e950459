"""Reading of torch files with weights-only loading, after a check of the records of the archive.

`torch.load` does not check them: with mmap=True it reads the bytes at a record's offset even if they are compressed,
and with or without mmap it reads as many bytes as the tensor needs, whatever the size of the record.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from fire_core.errors import UserError

_BYTES = {
    1: "Untyped Bool Byte Char QInt8 QUInt8 QUInt4x2 QUInt2x4",
    2: "Short Half BFloat16",
    4: "Int Float QInt32",
}
_BYTES |= {8: "Long Double ComplexFloat", 16: "ComplexDouble"}
ELEMENT_BYTES = {f"{kind}Storage": size for size, kinds in _BYTES.items() for kind in kinds.split()}


def load_torch(path: Path) -> Any:
    """Return what `torch.save` wrote, on the CPU, mapped if possible; raise UserError if it is damaged or unsafe."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=_can_be_mapped(path))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # torch's message advises to load without the safety
        raise UserError(
            f"{path} cannot be read safely: it is damaged, or holds more than plain weights and would run code; "
            "save the weights alone, best as safetensors, and use that file"
        ) from error


def _can_be_mapped(path: Path) -> bool:
    """Return whether every tensor record is uncompressed. Raises UserError for records of the wrong size."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
        if len(records) < len(archive.infolist()):
            raise UserError(f"{path} is damaged: its archive names a record twice; save it again")
        storages = _Storages(archive.read(records["data.pkl"]))
        for key, needed in storages.sizes.items():
            record = records.get(f"data/{key}")
            found = 0 if record is None else record.file_size
            if found != needed:
                raise UserError(
                    f"{path} is damaged: record data/{key} holds {found} bytes where its tensor needs {needed}; "
                    "save or fetch it again"
                )
        return all(records[f"data/{key}"].compress_type == zipfile.ZIP_STORED for key in storages.sizes)


class _Storages(pickle.Unpickler):
    """Unpickler that collects the sizes in bytes of the storages in a pickle; placeholders replace all classes."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        self.sizes: dict[str, int] = {}
        self.load()

    def find_class(self, module: str, name: str) -> Any:
        """Return the name of a storage class, and the placeholder for any other class."""
        return name if name in ELEMENT_BYTES else _Husk

    def persistent_load(self, reference: Any) -> Any:
        """Record the size of a storage and return a placeholder."""
        _, kind, key, _, count = reference
        self.sizes[key] = max(self.sizes.get(key, 0), count * ELEMENT_BYTES[kind])
        return _Husk()


class _Husk:
    def __init__(self, *arguments: Any, **settings: Any) -> None: ...

    def ignore(self, *values: Any) -> None: ...

    __setstate__ = __setitem__ = append = extend = add = ignore
