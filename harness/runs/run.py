"""A run and its folder, as `harness.session` uses them: identity, metrics, checkpoints, signals and the trunk. `with run:`
ends with DONE if the body has called `finish`; `launch` writes FAILED, with the traceback, after an error."""

import io
import json
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fire_core.errors import UserError, printable
from fire_core.files import remove_torn, write_atomic
from fire_core.report import Report
from harness.runs import checkpoint as checkpoints
from harness.runs.checkpoint import Parts
from harness.runs.folders import FolderLock, fingerprint, free_folder, place_of, read_meta, state_of
from harness.runs.machine import describe, write_facts
from harness.runs.metrics import METRICS, as_line, open_metrics, plain
from harness.runs.stack import member, pause
from harness.stop import STOPPED, StopRequest, say

Values = dict[str, Any]
WAIT_SECONDS = 0.5  # between two attempts to take a lock


class FinishedElsewhere(Exception):
    """Raised when another process has finished the run since this one asked whether it is finished."""


class Run:
    """One run. Its metrics and checkpoints go to `place`: the trunk's folder or the run's own, written from `with` on.

    Args:
        config: resolved keys that can change numbers; their hash is the run's identity.
        folder: `<root>/<experiment>/<size>/<label>/seed_<n>`. If it belongs to another config, the run gets a folder
            with the hash in its label.
        saving: an object with the keys of `RunKeys` in harness/settings.py as attributes.
        trunk: settings that phase 0 depends on, if it may be shared; None to train it in this run.
        meta: further entries of meta.json.
    """

    def __init__(
        self, config: Values, folder: Path, *, saving: Any, trunk: Values | None = None, **meta: Any
    ) -> None:
        self.config, self.saving, self.identity = config, saving, fingerprint(config)
        self.folder = self.place = free_folder(folder, config)
        if self.folder != folder:
            print(f"note: {folder.parent} has another config; this one goes to {self.folder}", flush=True)
        self.meta = place_of(folder) | {"identity": self.identity} | meta
        self.trunk: Path | None = None
        if trunk is not None:
            self.trunk = folder.parents[3] / "trunks" / fingerprint(trunk)
            self.meta["trunk"] = self.trunk.name
            self._trunk_lock = FolderLock(self.trunk)
        self._lock = FolderLock(self.folder)
        self._metrics: BinaryIO = io.BytesIO()  # until `resume` opens the file
        self._stop = StopRequest()
        self.stop_signal: str | None = None  # that the last `due` saw; a later one waits for the next `due`
        self._saved_at = (time.monotonic(), 0)
        self._complete = False

    @property
    def finished(self) -> bool:
        """Whether this run is complete already; prints that it is."""
        if state_of(self.folder) != "done":
            return False
        commit, here, note = read_meta(self.folder).get("commit"), describe(), ""
        if commit != here["commit"] or here["dirty"]:
            note = f", with the code of commit {(commit or 'unknown')[:10]}, from which the files here differ"
        print(printable(f"finished already{note}: {self.folder} (delete it to run again)"), flush=True)
        return True

    def __enter__(self) -> "Run":
        self._wait_for(self._lock, str(self.folder))
        with ExitStack() as undo:  # in the opposite order
            undo.callback(self._stop.unwatch)
            undo.callback(self._lock.release)
            undo.callback(self._unmark)
            self._start()
            self._stop.watch()
            self._close = undo.pop_all()
        return self

    def _start(self) -> None:
        """Mark the folder as that of a run that is being trained. Raises if another process has meanwhile used it."""
        if read_meta(self.folder).get("identity") not in (None, self.identity):
            raise UserError(f"another config has taken {self.folder} meanwhile: run the same command again")
        if state_of(self.folder) == "done":
            raise FinishedElsewhere(f"finished by another process: {self.folder}")
        try:
            remove_torn(self.folder)
            (self.folder / "FAILED").unlink(missing_ok=True)
            write_atomic(self.folder / "RUNNING", f"{os.getpid()}\n")
            write_facts(self.folder, self.config, self.meta)
        except OSError as error:
            raise UserError(f"cannot write in {self.folder} ({error.strerror}): change run.root") from error

    def _unmark(self) -> None:
        with suppress(OSError):
            (self.folder / "RUNNING").unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        with self._close:
            if error is None:
                self._end()
            else:
                with suppress(OSError):
                    self._metrics.close()
        # it came too late to save: no other run may begin; those of a stack have seen it
        if error is None and self._stop.name is not None and member() is None:
            signal.raise_signal(signal.Signals[self._stop.name])

    def _end(self) -> None:
        """Close the files of a run that ended without an error, and write DONE if it called `finish`."""
        self._metrics.close()
        if self._complete:
            self._unmark()  # first, so that no kill leaves both marks
            write_atomic(self.folder / "DONE", "")
            checkpoints.delete_unnamed(self.folder / "checkpoint")

    def resume(self, fork: str | None = None) -> Parts | None:
        """Return the parts of the checkpoint to resume from, None if training starts from scratch.

        That is the newest intact checkpoint of this run; else the end (or checkpoint `fork`) of its finished trunk; else
        the newest of the unfinished trunk, which this run then trains. Metrics after the checkpoint are cut off.
        """
        parts = checkpoints.load_latest(self.folder / "checkpoint")
        if parts is None and self.trunk is not None:
            return self._enter_trunk(self.trunk, fork)
        self.trunk = None  # it has left the trunk, or began without one
        return self._begin(parts)

    def _enter_trunk(self, trunk: Path, fork: str | None) -> Parts | None:
        self._wait_for(self._trunk_lock, f"the shared phase 0 in {trunk}", ready=trunk / "DONE")
        self._close.callback(self._trunk_lock.release)
        if (trunk / "DONE").exists():
            self._trunk_lock.release()
            print(f"phase 0 from {trunk}", flush=True)
            return self._fork(trunk, fork or "end")
        remove_torn(trunk)  # of a process that was killed while it trained this trunk
        parts = checkpoints.load_latest(trunk / "checkpoint")
        write_facts(trunk, self.config, self.meta)
        self.place = trunk
        return self._begin(parts)

    def _fork(self, trunk: Path, name: str) -> Parts:
        """Go on in the run's own folder after a checkpoint of the finished trunk, and return its parts."""
        path = trunk / "checkpoint" / f"{name}.pt"
        parts = checkpoints.load(path, f"delete {trunk} and the same command trains the shared phase 0 again")
        parts.check_owner(trunk.name)
        self.place = self.folder
        self._open_metrics(parts["_metrics_bytes"], trunk)
        return parts

    def _begin(self, parts: Parts | None) -> Parts | None:
        """Return the parts of a checkpoint in `place`, after opening the metrics that it counts."""
        if parts is None:
            self._open_metrics(0)
        else:
            parts.check_owner(self._owner())
            self._open_metrics(parts["_metrics_bytes"])
            print(printable(f"resuming from {parts.path}"), flush=True)
        return parts

    def _open_metrics(self, size: int, source: Path | None = None) -> None:
        self._metrics.close()
        self._metrics = open_metrics(self.place, size, source)

    def _owner(self) -> str:
        """Return the identity of the checkpoints in `place`: the trunk's or this run's."""
        return self.place.name if self.place == self.trunk else self.identity

    def log(self, **values: Any) -> None:
        """Append one line to metrics.jsonl. Values must be deterministic: durations go to `timing`."""
        self._metrics.write(as_line(values).encode())
        self._metrics.flush()

    def timing(self, **values: Any) -> None:
        """Append one line to timing.jsonl: counts and seconds, which differ between repetitions of a run."""
        with (self.place / "timing.jsonl").open("a") as handle:
            handle.write(as_line(values))

    def boundary(self, act: int, report: Report, **where: Any) -> None:
        """Write the report of act `act` of the method, and where it took place, as boundary_<act>.json."""
        text = json.dumps({"act": act, **where, **report.to_dict()}, indent=1)
        write_atomic(self.folder / f"boundary_{act}.json", text)

    def due(self, step: int) -> bool:
        """Return whether to save now: the interval (seconds or steps) is over, or a signal asks to stop."""
        self.stop_signal = self._stop.name
        saved_time, saved_step = self._saved_at
        by_steps = self.saving.checkpoint_steps > 0 and step - saved_step >= self.saving.checkpoint_steps
        by_time = time.monotonic() - saved_time >= self.saving.checkpoint_seconds
        return self.stop_signal is not None or by_steps or by_time

    def save(self, step: int, parts: Values, name: str | None = None) -> None:
        """Write a checkpoint. If it has no name, and `due` has seen a signal that asks to stop, exit with code 75."""
        os.fsync(self._metrics.fileno())
        counted = {"_identity": self._owner(), "_metrics_bytes": self._metrics.tell()}
        try:
            folder, keep = self.place / "checkpoint", self.saving.keep
            path = checkpoints.save(folder, step, parts | counted, name=name, keep=keep)
        except UserError:
            if self._stop.urgent:  # PyTorch turns the interrupt into an error of the file
                raise KeyboardInterrupt from None
            raise
        if name in (None, "end"):  # runs resume from these
            self._saved_at = (time.monotonic(), step)
        if self.stop_signal is not None and name is None:
            say(f"stopped by {self.stop_signal}; saved {path}; the same command resumes from there")
            sys.exit(STOPPED)

    def leave_trunk(self, step: int, parts: Values, fork: str | None = None) -> Parts | None:
        """End phase 0: finish the trunk for the other methods and continue in the run's own folder.

        Returns the parts of checkpoint `fork`, which the caller must load and save; None if `fork` is None. A run without
        a trunk reads `fork` from its own folder, where the unnamed checkpoints are deleted.
        """
        if self.trunk is not None and self.place == self.trunk:
            self.save(step, parts, name="end")
            write_atomic(self.trunk / "DONE", "")
            checkpoints.delete_unnamed(self.trunk / "checkpoint")
            self._trunk_lock.release()
            if fork:
                return self._fork(self.trunk, fork)
            self.place = self.folder
            self._open_metrics((self.trunk / METRICS).stat().st_size, self.trunk)
            return None
        if fork is None:
            return None
        loaded = checkpoints.load(self.folder / "checkpoint" / f"{fork}.pt")
        checkpoints.delete_unnamed(self.folder / "checkpoint")  # they count lines that are cut off now
        return self._begin(loaded)

    def finish(self, summary: Values) -> None:
        """Write summary.json, after the last checkpoint; the run counts as done when the `with` body ends."""
        text = json.dumps({name: plain(value) for name, value in summary.items()}, indent=1)
        write_atomic(self.folder / "summary.json", text)
        self._complete = True

    def _wait_for(self, lock: FolderLock, trains: str, ready: Path | None = None) -> None:
        """Take a lock, after the process that holds it, or wait for the file `ready`. A signal ends the process."""
        waits = 0
        while not (ready is not None and ready.exists()) and not lock.acquire(wait=False):
            if (waits := waits + 1) == 1:
                print(f"waiting for another process that trains {trains}", flush=True)
            if self._stop.name is not None:
                say(f"stopped by {self._stop.name} while waiting; nothing is lost")
                sys.exit(STOPPED)
            pause(WAIT_SECONDS, ready)
