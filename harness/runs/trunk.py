"""Trunks: phase 0, trained once for all methods that do nothing in it, and forked by each."""

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
    """Hash of plain values, independent of the order of keys."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def same_last_phase(
    folder: Path, last_phase: str | None, boundary: dict[str, Any]
) -> tuple[Path, list[dict[str, Any]]] | None:
    """A finished run of the same seed whose last phase is that of the run in `folder`: its folder and the metrics of that
    phase, from the boundary's line on.

    It must have the same fingerprint `last_phase`, and have stood at the same values right after its boundary.
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
    """Exclusive lock on a folder, released by the system when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / ".lock", thread_local=False)

    def acquire(self, *, wait: bool) -> bool:
        """Take the lock; without `wait`, False at once where another process holds it."""
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
