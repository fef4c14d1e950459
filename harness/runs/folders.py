"""The folders of runs: finding and locking them, the state of each run, and its files."""

import errno
import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from fire_core.errors import UserError

RUNNING_SECONDS = 180.0  # a folder with RUNNING that was written to this recently counts as running


def find_folders(root: str | Path, size: str | None = None) -> list[Path]:
    """Return every `seed_*` folder below `root` in sorted order. Raises UserError if `root` does not exist."""
    if not os.path.isdir(root):  # unlike Path.is_dir, False for a path that is too long
        raise UserError(f"no run folder at '{root}': start a run first, or name another folder")
    found = [path for path in Path(root).glob(f"*/{size or '*'}/*/seed_*") if path.is_dir()]
    runs = [path for path in found if not path.parts[-4].startswith(".")]
    return sorted(runs, key=lambda path: tuple(place_of(path).values()))


def place_of(path: Path) -> dict[str, Any]:
    """Return experiment, size, label and seed of a run, from the path of its folder; -1 for a seed that is no number."""
    experiment, size, label, name = path.parts[-4:]
    tail = name.removeprefix("seed_")
    seed = int(tail) if tail.isdecimal() else -1
    return {"experiment": experiment, "size": size, "label": label, "seed": seed}


def free_folder(path: Path, config: dict[str, Any]) -> Path:
    """Return the folder of a run or, if its label belongs to another config, one whose label ends in a hash of `config`.
    The seeds of a label share all else."""
    taken = read_meta(path).get("identity") or ((known := read_config(path)) and fingerprint(known))
    own = without_seed(config)
    seeds = (without_seed(known) for known in map(_readable, sorted(path.parent.glob("seed_*"))) if known)
    other = taken != fingerprint(config) if taken else next(seeds, own) != own
    return path.parents[1] / f"{path.parent.name}-{own}" / path.name if other else path


def _readable(path: Path) -> dict[str, Any]:
    """Return the config of a run, {} if it is damaged."""
    with suppress(UserError):
        return read_config(path)
    return {}


def without_seed(config: dict[str, Any]) -> str:
    """Return the hash of a config but for its seed."""
    return fingerprint({key: value for key, value in config.items() if key != "seed"}, 8)


def state_of(path: Path) -> str:
    """Return the state of a run: done, failed, running or unfinished (stopped or killed; the same command resumes it)."""
    if (path / "DONE").exists():
        return "done"
    if (path / "FAILED").exists():
        return "failed"
    return "running" if (path / "RUNNING").exists() and _alive(path) else "unfinished"


def _alive(path: Path) -> bool:
    """Return whether a process of the number in RUNNING exists here, or one elsewhere wrote to the folder lately."""
    mark = read_text(path / "RUNNING").strip()
    if mark.isascii() and mark.isdigit() and Path(f"/proc/{mark[:20]}").exists():
        return True
    try:
        newest = max((p.lstat().st_mtime for p in path.iterdir() if p.is_file()), default=0.0)
    except FileNotFoundError:  # just renamed or removed
        return True
    return time.time() - newest < RUNNING_SECONDS


def identify(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Return experiment, size, label, seed, method and status of a run. Without meta.json, the label tells the method."""
    row = place_of(path)
    method = str(meta.get("method") or row["label"].partition("-")[0])
    return row | {"method": method, "status": state_of(path)}


def describe_run(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return everything about a run except its numbers, as one row; `dirty` says whether any start used changed code."""
    meta = read_meta(path)
    trunk = read_meta(path.parents[3] / "trunks" / Path(str(meta["trunk"])).name) if "trunk" in meta else {}
    changed = [start.get("dirty", False) for start in (*_starts(meta), *_starts(trunk))]
    row = identify(path, meta) | {"path": str(path)}
    row |= {"commit": _commits(meta) or "unknown", "trunk_commit": _commits(trunk)}
    row |= {"dirty": any(changed) or (None if None in changed else False)}
    row |= {"data": str(meta.get("data") or "unknown"), "machine": str(meta.get("hardware") or "unknown")}
    row |= {key: str(meta.get(key) or "") for key in ("domain", "started")}
    protocol = config.get("protocol")
    return row | {"protocol": str((protocol.get("name") if isinstance(protocol, dict) else protocol) or "")}


def _starts(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """Return commit, `dirty` and date of each start of a run, in order; a run that was stopped has several."""
    return [start for start in (*meta.get("earlier", []), meta) if start]


def _commits(meta: dict[str, Any]) -> str:
    return " ".join(dict.fromkeys(str(start.get("commit") or "unknown")[:10] for start in _starts(meta)))


def read_meta(path: Path) -> dict[str, Any]:
    """Return the content of meta.json of a run or trunk, {} if it is missing or damaged."""
    found = read_json(path / "meta.json")
    return found if isinstance(found, dict) else {}


def content(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError for anything else, such as a pipe, which would never end."""
    if not path.is_file():
        raise OSError(errno.ENOENT, "there is no regular file", str(path))
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, None if it is missing or damaged."""
    try:
        return json.loads(content(path))
    except (OSError, ValueError, RecursionError):
        return None


def read_text(path: Path) -> str:
    """Return the content of a file that may be damaged: "" if it cannot be read, other bytes than UTF-8 replaced."""
    try:
        return content(path).decode("utf-8", "replace")
    except OSError:
        return ""


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return (records, number of damaged lines) of a JSON-lines file."""
    # NaN and infinities, which Python writes into JSON although the format has none, become None
    decoder = json.JSONDecoder(parse_constant=lambda name: None)
    records, damaged = [], 0
    for line in content(path).split(b"\n"):
        try:
            record = decoder.decode(line.decode()) if line.strip() else {}
        except (ValueError, RecursionError):
            record = None
        if record and isinstance(record, dict):
            records.append(record)
        elif record != {}:
            damaged += 1
    return records, damaged


def fingerprint(config: Any, length: int = 12) -> str:
    """Return the first `length` hex digits of a SHA-256 of plain values, whatever the order of keys."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


class FolderLock:
    """An exclusive lock on a folder; `with` waits for it. The system releases it when the process ends, even if killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, FileLock(folder / ".lock", thread_local=False)
        self.release = self._lock.release

    def acquire(self, *, wait: bool = True) -> bool:
        """Take the lock and return True; without `wait`, return False at once if another process has it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            return False
        except OSError as error:
            choose = "choose another folder (run.root, run.data_root)"
            raise UserError(f"cannot write in {self.folder}: {error.strerror}; {choose}") from error
        return True

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the resolved configuration of a run, {} if it was not written. Raises UserError if it is damaged."""
    file = Path(path) / "config.yaml"
    if not file.exists():
        return {}
    try:
        text = content(file).decode("utf-8")
        # the fast parser, written in C, crashes at tens of thousands of nested brackets
        fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        found = yaml.load(text, Loader=fast if len(text) < 10_000 else yaml.SafeLoader) or {}
        if not isinstance(found, dict):
            raise ValueError("it holds no settings")
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        wrong = f"{file} cannot be read ({' '.join(str(error).split())[:200]})"
        raise UserError(f"{wrong}: delete the run's folder to run it again") from error
    return found
