"""One run folder: where it is, how it stands, what its files say. See load.py for many runs at once."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from fire_core.errors import UserError

_PROTOCOLS: dict[str, str] = {}
NOT_EXPERIMENTS = {"notebooks", "trunks", "summary", "report", "figures", "tables"}
SCRIPTS = {
    "vision": "vision/train.py",
    "language": "language/train.py",
    "dqn": "rl/dqn/train.py",
    "sac": "rl/sac/train.py",
}
GIVEN = {"experiment", "size", "method", "seed", "threads"}
RUNNING_SECONDS = 180.0  # a folder without an end marker that was written to this recently counts as running


def figure_and_panel(experiment: str) -> tuple[str, str]:
    """`fig2a_cifar10_resnet18` -> ("fig2a", "cifar10_resnet18"); other names -> ("", name)."""
    head, _, tail = experiment.partition("_")
    return (head, tail) if head.startswith("fig") and tail else ("", experiment)


def find_folders(
    root: str | Path, experiments: Iterable[str] | None = None, size: str | None = None
) -> list[Path]:
    """Every `seed_*` folder below `root` in sorted order; UserError if `root` does not exist."""
    root = Path(root)
    if not root.is_dir():
        raise UserError(f"no run folder at '{root}': start a sweep first (make vision-sweep), or give --root")
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


def status_of(path: Path) -> str:
    """`done`, `damaged` (done, but its metrics are not those that it ended with), `failed`, `running` or `unfinished`
    (killed: the same command goes on from its checkpoint)."""
    if (path / "DONE").exists():
        metrics, size = path / "metrics.jsonl", (path / "DONE").read_text(encoding="utf-8").split(" ")[0]
        whole = metrics.exists() and size in (
            "",
            str(metrics.stat().st_size),
        )  # earlier versions kept no size
        return "done" if whole else "damaged"
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


def describe_run(path: Path) -> dict[str, Any]:
    """One row of `runs`, from meta.json where it exists and from the folder's own name where it does not.

    `dirty`: this run or the first phase that it shares was made, in part at least, from a changed checkout.
    """
    label, size, experiment = path.parent.name, path.parent.parent.name, path.parent.parent.parent.name
    meta = read_json(path / "meta.json") or {}
    trunk = read_json(path.parents[3] / "trunks" / meta["trunk"] / "meta.json") if "trunk" in meta else None
    trunk = trunk or {}
    figure, panel = figure_and_panel(experiment)
    return {
        "experiment": experiment,
        "figure": figure,
        "panel": panel,
        "size": size,
        "data": _data(meta, path),
        "method": str(meta.get("method") or label.partition("-")[0]),
        "label": label,
        "seed": _seed(path),
        "status": status_of(path),
        "commit": _commits(meta) or "unknown",
        "trunk_commit": _commits(trunk),
        "dirty": any(bool(part.get("dirty")) for part in (*starts(meta), *starts(trunk))),
        "machine": _name(meta.get("hardware")),
        "domain": str(meta.get("domain") or ""),
        "protocol": _protocol(path) if (path / "config.yaml").exists() else "",
        "command": command_of(meta, label, read_config(path)),
        "started": str(meta.get("started") or ""),
        "path": str(path),
    }


def starts(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """What each start of a run was made with, the first one first; a run that was stopped has several."""
    return [*meta.get("earlier", []), meta] if meta else []


def _commits(meta: dict[str, Any]) -> str:
    """The commits of all starts, as a rule one."""
    return " ".join(dict.fromkeys(str(start.get("commit") or "unknown")[:10] for start in starts(meta)))


def _protocol(path: Path) -> str:
    """The protocol's name, read once per experiment and size: it is a matter of the experiment."""
    key = str(path.parent.parent.resolve())
    if key not in _PROTOCOLS:
        protocol = read_config(path).get("protocol") or ""
        _PROTOCOLS[key] = str(protocol.get("name", "")) if isinstance(protocol, dict) else str(protocol)
    return _PROTOCOLS[key]


def command_of(meta: dict[str, Any], label: str, config: dict[str, Any]) -> str:
    """The command of one run without its seed. A sweep's command is cut down to this run's share of it.

    What an experiment's own sweep set is in the label alone, there without the "method." of the method's settings.
    """
    parts = [f"{key}={meta.get(key)}" for key in ("experiment", "size", "method")]
    for argument in str(meta.get("command") or "").split()[1:]:
        key, _, value = argument.partition("=")
        if argument.startswith("-") or key in GIVEN or key.startswith(("run.", "hydra")):
            continue
        if key.endswith(".folder"):
            value = "FOLDER"  # where data lies is a matter of one machine
        if "," in value and not value.startswith(("[", "{", "'")):
            short = key.removeprefix("method.")
            value = next((v for v in value.split(",") if f"{short}={v}" in label), value)
        parts.append(f"{key}={value}")
    typed = {part.partition("=")[0].removeprefix("method.") for part in parts}
    for key, value in settings_of(label).items():
        if key not in typed:
            parts.append(f"{key}={value}" if key.partition(".")[0] in config else f"method.{key}={value}")
    return f"python {SCRIPTS.get(str(meta.get('domain')), 'vision/train.py')} {' '.join(parts)}"


def settings_of(label: str) -> dict[str, str]:
    """What a label says beside the method: `fire-iterations=20-lr=1e-3` -> {"iterations": "20", "lr": "1e-3"}.

    The eight digits at the end of a folder that had to make way for another config are no setting.
    """
    settings: dict[str, str] = {}
    for part in re.sub(r"-[0-9a-f]{8}$", "", label).split("-")[1:]:
        key, equals, value = part.partition("=")
        if equals:
            settings[key] = value
        elif settings:  # a minus sign inside a value
            settings[[*settings][-1]] += f"-{part}"
    return settings


def read_json(path: Path) -> Any:
    """The parsed file, or None if it is absent or torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _data(meta: dict[str, Any], path: Path) -> str:
    """The data set, corpus or environment: meta.json says it, else the configuration."""
    if meta.get("data"):
        return _name(meta["data"])
    config = read_config(path)
    return next((_name(config[key]) for key in ("data", "corpus", "env") if config.get(key)), "unknown")


def _name(value: Any) -> str:
    """A readable text of a name, a list of names or a mapping with a name."""
    if isinstance(value, dict):
        return str(value.get("name") or ", ".join(str(v) for v in value.values() if isinstance(v, str | int)))
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
                f"{file} cannot be read ({reason}): delete the run's folder to make it again"
            ) from error


def read_boundaries(path: str | Path) -> list[dict[str, Any]]:
    """The boundary reports of a run in order of phase."""
    found = [read_json(file) for file in Path(path).glob("boundary_*.json")]
    return sorted((report for report in found if report), key=lambda report: report.get("phase", 0))


def read_timing(path: str | Path) -> list[dict[str, Any]]:
    """The lines of timing.jsonl; they vary from run to run and never enter a comparison of accuracy."""
    file = Path(path) / "timing.jsonl"
    return read_lines(file)[0] if file.exists() else []
