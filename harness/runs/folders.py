"""The folders of runs: which there are, what state each run is in, and what its files say."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from fire_core.checkpoints.atomic import write_atomic
from fire_core.errors import UserError

NOT_EXPERIMENTS = {"notebooks", "trunks", "summary", "report", "figures", "tables"}
SCRIPTS = {
    "vision": "vision/train.py",
    "language": "language/train.py",
    "dqn": "rl/dqn/train.py",
    "sac": "rl/sac/train.py",
}
RUNNING_SECONDS = 180.0  # a folder without an end marker that was written to this recently counts as running


def find_folders(
    root: str | Path, experiments: Iterable[str] | None = None, size: str | None = None
) -> list[Path]:
    """Every `seed_*` folder below `root` in sorted order; UserError if `root` does not exist."""
    root = Path(root)
    if not root.is_dir():
        raise UserError(
            f"no run folder at '{root}': start a sweep first (make vision-sweep), or name another folder"
        )
    names = sorted(experiments) if experiments else sorted(p.name for p in root.iterdir() if p.is_dir())
    found = []
    for name in names:
        if name not in NOT_EXPERIMENTS and not name.startswith("."):
            found += sorted((root / name).glob(f"{size or '*'}/*/seed_*"), key=_folder_order)
    return [path for path in found if path.is_dir()]


def _folder_order(path: Path) -> tuple[str, str, int]:
    return path.parent.parent.name, path.parent.name, _seed(path)


def _seed(path: Path) -> int:
    tail = path.name.removeprefix("seed_")
    return int(tail) if tail.isdigit() else -1


def state_of(path: Path) -> str:
    """`done`, `damaged` (done, but without the metrics that it ended with), `failed`, `running`, or `unfinished` (stopped or
    killed: the same command resumes it)."""
    if (path / "DONE").exists():
        metrics, noted = path / "metrics.jsonl", (path / "DONE").read_text(encoding="utf-8").split(" ")[0]
        size = metrics.stat().st_size if metrics.exists() else 0
        return "done" if size and noted in ("", str(size)) else "damaged"  # "": of earlier versions
    if (path / "FAILED").exists():
        return "failed"
    return "running" if (path / "RUNNING").exists() and _alive(path) else "unfinished"


def _alive(path: Path) -> bool:
    """The process named in RUNNING exists here, or (on another machine) the folder was written to lately."""
    mark = (path / "RUNNING").read_text(encoding="utf-8").strip()
    if mark.isdigit() and Path("/proc").is_dir() and Path(f"/proc/{mark}").exists():
        return True
    newest = max((p.stat().st_mtime for p in path.iterdir() if p.is_file()), default=0.0)
    return time.time() - newest < RUNNING_SECONDS


def identify(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Which run it is and its state, from meta.json and, where that is lost, from the folder's own name."""
    label, size, experiment = path.parent.name, path.parent.parent.name, path.parent.parent.parent.name
    return {
        "experiment": experiment,
        "size": size,
        "method": str(meta.get("method") or label.partition("-")[0]),
        "label": label,
        "seed": _seed(path),
        "status": state_of(path),
    }


def describe_run(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Everything about a run but its numbers, as one row.

    `dirty`: this run or the first phase that it shares was made, in part at least, from a changed checkout.
    """
    meta = read_meta(path)
    trunk = read_meta(path.parents[3] / "trunks" / meta["trunk"]) if "trunk" in meta else {}
    data = meta.get("data") or next((config[key] for key in ("data", "corpus", "env") if config.get(key)), "")
    return identify(path, meta) | {
        "data": _name(data),
        "commit": _commits(meta) or "unknown",
        "trunk_commit": _commits(trunk),
        "dirty": any(bool(part.get("dirty")) for part in (*starts(meta), *starts(trunk))),
        "machine": _name(meta.get("hardware")),
        "domain": str(meta.get("domain") or ""),
        "protocol": _name(config["protocol"]) if config.get("protocol") else "",
        "command": command_of(meta),
        "started": str(meta.get("started") or ""),
        "path": str(path),
    }


def starts(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """What each start of a run was made with, the first one first; a run that was stopped has several."""
    return [*meta.get("earlier", []), meta] if meta else []


def _commits(meta: dict[str, Any]) -> str:
    """The commits of all starts, as a rule one."""
    return " ".join(dict.fromkeys(str(start.get("commit") or "unknown")[:10] for start in starts(meta)))


def command_of(meta: dict[str, Any]) -> str:
    """The command of one run without its seed; where data lies is a matter of one machine."""
    if "overrides" not in meta:  # of earlier versions
        return str(meta.get("command") or "")
    parts = [f"{key}={meta.get(key)}" for key in ("experiment", "size", "method")]
    for override in meta["overrides"]:
        key, _, _ = override.partition("=")
        parts.append(f"{key}=FOLDER" if key.endswith(".folder") else override)
    return f"python {SCRIPTS.get(str(meta.get('domain')), 'train.py')} {' '.join(parts)}"


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a run or trunk, {} where it is absent or damaged."""
    meta = read_json(path / "meta.json")
    return meta if isinstance(meta, dict) else {}


def read_json(path: Path) -> Any:
    """The parsed file, or None if it is absent or torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _name(value: Any) -> str:
    """A readable text of a name, a list of names or a mapping with the name of something or of a game."""
    if isinstance(value, dict):
        return str(
            value.get("name")
            or value.get("game")
            or ", ".join(str(v) for v in value.values() if isinstance(v, str | int))
        )
    if isinstance(value, list | tuple):
        return " + ".join(map(str, value))
    return str(value or "unknown")


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(records, number of torn lines) of a JSON-lines file."""
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]", parse_constant=_no_number)
    except ValueError:
        found = [_parsed(line) for line in lines]
    records = [record for record in found if isinstance(record, dict)]
    return records, len(found) - len(records)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line, parse_constant=_no_number)
    except ValueError:
        return None


def _no_number(name: str) -> None:
    """NaN and infinities, which Python's own writer puts into JSON, are no numbers."""


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write the resolved configuration of a run or trunk."""
    write_atomic(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))


def read_config(path: str | Path) -> dict[str, Any]:
    """The resolved configuration of a run, {} if it was not written."""
    file = Path(path) / "config.yaml"
    if not file.exists():
        return {}
    with file.open(encoding="utf-8") as stream:
        try:
            return yaml.load(stream, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
        except yaml.YAMLError as error:
            reason = str(error).replace("\n", " ")
            raise UserError(
                f"{file} cannot be read ({reason}): delete the run's folder to run it again"
            ) from error


def read_boundaries(path: str | Path) -> list[dict[str, Any]]:
    """The boundary reports of a run in order of phase."""
    found = [read_json(file) for file in Path(path).glob("boundary_*.json")]
    return sorted((report for report in found if report), key=lambda report: report.get("phase", 0))


def read_timing(path: str | Path) -> list[dict[str, Any]]:
    """The lines of timing.jsonl; they vary from run to run and never enter a comparison of accuracy."""
    file = Path(path) / "timing.jsonl"
    return read_lines(file)[0] if file.exists() else []
