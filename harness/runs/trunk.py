"""Trunks: phase 0, trained once and shared by all methods that do nothing in it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fire_core.errors import UserError
from harness.runs import metrics
from harness.runs.folders import read_meta
from harness.runs.metrics import plain


def fingerprint(config: Any, length: int = 12) -> str:
    """Return the first `length` hex digits of a SHA-256 of plain values, whatever the order of keys."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def same_last_phase(
    folder: Path, last_phase: str | None, boundary: dict[str, Any]
) -> tuple[Path, list[dict[str, Any]]] | None:
    """Return a finished run of the same seed whose last phase is that of the run in `folder`; None if there is none.

    It must have the same fingerprint `last_phase` and the same values `after_*` of `boundary`. The result is its folder
    and the metrics of that phase, from the line of the boundary on.
    """
    after = {key: plain(value) for key, value in boundary.items() if key.startswith("after_")}
    for path in sorted(folder.parents[3].glob(f"*/*/*/{folder.name}/meta.json")):
        other = path.parent
        if last_phase is None or read_meta(other).get("last_phase") != last_phase:
            continue
        if (
            other == folder
            or not (other / "DONE").exists()
            or not (other / "checkpoint" / "final.pt").is_file()
        ):
            continue
        lines = [line for line in metrics.read(other) if line["phase"] == 1]
        if all(lines[0].get(key) == value for key, value in after.items()):
            return other, lines
    return None


class FolderLock:
    """An exclusive lock on a folder. The system releases it when the process ends, even if it is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / ".lock", thread_local=False)

    def acquire(self, *, wait: bool) -> bool:
        """Take the lock and return True. Without `wait`, return False at once if another process holds it.

        Raises UserError if the folder cannot be written.
        """
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
