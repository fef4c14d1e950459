"""The hash that identifies settings, and an exclusive lock on a folder, as runs, trunks and data sets use them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fire_core.errors import UserError
from harness.runs.folders import refuse_link


def fingerprint(config: Any, length: int = 12) -> str:
    """Return the first `length` hex digits of a SHA-256 of plain values, whatever the order of keys."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


class FolderLock:
    """An exclusive lock on a folder; `with` waits for it. The system releases it when the process ends, even if killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / ".lock", thread_local=False)

    def acquire(self, *, wait: bool) -> bool:
        """Take the lock and return True. Without `wait`, return False at once if another process holds it.

        Raises UserError if the folder cannot be written or its lock is a link.
        """
        refuse_link(self.folder / ".lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            return False
        except OSError as error:
            raise UserError(
                f"cannot write in {self.folder}: {error.strerror}; choose another folder (run.root, run.data_root)"
            ) from error
        return True

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire(wait=True)

    def __exit__(self, *error: object) -> None:
        self.release()
