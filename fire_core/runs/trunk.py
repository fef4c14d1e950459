"""Trunks: phase 0, trained once for all methods that do nothing in it, and forked by each."""

from __future__ import annotations

import fcntl
import hashlib
import json
from pathlib import Path
from typing import IO, Any

from fire_core.errors import UserError


def fingerprint(config: Any, length: int = 12) -> str:
    """Hash of plain values, independent of the order of keys."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


class FolderLock:
    """Exclusive lock on a folder, released by the system when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        self.handle: IO[str] | None = None

    def acquire(self, *, wait: bool) -> bool:
        """Take the lock; without `wait`, False at once where another process holds it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.handle = self.path.open("a")
        except OSError as error:
            raise UserError(
                f"cannot write in {self.path.parent}: {error.strerror}; choose another folder (run.root, run.data_root)"
            ) from error
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            self.handle.close()
            self.handle = None
            return False
        return True

    def release(self) -> None:
        if self.handle is not None:
            self.handle.close()
            self.handle = None
