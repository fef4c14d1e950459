"""The order in which jobs start, and a forecast of a campaign's time, disk and memory by the same rule.

A run that starts from a trunk is ready if the trunk is finished, or if no other run trains it: then this run trains it.
So no run waits for a lock. Runs of one domain are trained together, as many at a time as the manifest says.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.campaign.manifest import Job


def ready(
    waiting: Sequence[Job],
    running: Collection[Job],
    at_a_time: Mapping[str, int],
    trunks: Collection[Path],
    busy: Collection[Path] = (),
) -> list[Job]:
    """Return the jobs to start now, in order.

    One domain runs at a time, that of the first job. While a job waits for its trunk, later jobs of the domain start.

    Args:
        waiting: jobs not started, in the order of the campaign.
        trunks: finished trunks.
        busy: trunks that another process is training.
    """
    in_training = {job.trunk for job in running if job.trunk not in trunks} | set(busy)
    domain = next((job.domain for job in [*running, *waiting]), "")
    start: list[Job] = []
    blocked = False
    for job in waiting:
        if len(running) + len(start) >= at_a_time[domain]:
            break
        if job.domain != domain:
            if blocked:
                continue
            break
        if job.trunk is not None and job.trunk in in_training:
            blocked = True
            continue
        start.append(job)
        if job.trunk is not None and job.trunk not in trunks:
            in_training.add(job.trunk)
    return start


def spent_trunks(trunks: Collection[Path], unfinished: Collection[Job]) -> list[Path]:
    """Return the trunks that no unfinished job starts from."""
    wanted = {job.trunk for job in unfinished}
    return sorted(trunk for trunk in trunks if trunk not in wanted)


@dataclass(frozen=True)
class Forecast:
    """Duration of a campaign in seconds; peaks of disk and memory and the disk used at its end (left), in bytes.

    ends: {name of a job: second at which it ends}.
    """

    seconds: float
    disk: int
    left: int
    memory: int
    ends: dict[str, float]


def simulate(
    jobs: Sequence[Job],
    seconds: Mapping[str, tuple[float, float]],
    at_a_time: Mapping[str, int],
    delete_trunks: Collection[str] = (),
    trunks: Collection[Path] = (),
) -> Forecast:
    """Return the forecast of a campaign, simulated without training.

    Args:
        seconds: {name of a job: seconds before and after its first boundary}.
        delete_trunks: domains whose trunks are deleted after their last run.
        trunks: trunks that are finished already.
    """
    waiting, running = list(jobs), dict[Job, None]()
    there, sizes = set(trunks), dict[Path, int]()
    now, left, disk, memory = 0.0, 0, 0, 0
    ends: dict[str, float] = {}
    events: list[tuple[float, int, str, Job]] = []
    number = itertools.count()
    while waiting or running:
        for job in ready(waiting, running, at_a_time, there):
            waiting.remove(job)
            running[job] = None
            first, second = seconds[job.name]
            if job.trunk in there:
                first = 0.0
            elif job.trunk is not None:
                sizes[job.trunk] = job.work.trunk_bytes
                heapq.heappush(events, (now + first, next(number), "trunk", job))
            heapq.heappush(events, (now + first + second, next(number), "end", job))
        disk = max(disk, left + sum(sizes.values()) + sum(job.work.running_bytes for job in running))
        shared = {job.trunk: job.work.trunk_memory for job in running}
        memory = max(memory, sum(job.work.memory for job in running) + sum(shared.values()))
        now, _, event, job = heapq.heappop(events)
        if event == "trunk":
            assert job.trunk is not None
            there.add(job.trunk)
            continue
        del running[job]
        left += job.work.left_bytes
        ends[job.name] = now
        if job.domain in delete_trunks:
            gone = spent_trunks([job.trunk] if job.trunk else [], [*waiting, *running])
            for trunk in gone:
                sizes.pop(trunk, None)
    return Forecast(now, disk, left + sum(sizes.values()), memory, ends)


def within(
    jobs: Sequence[Job],
    seconds: Mapping[str, tuple[float, float]],
    at_a_time: Mapping[str, int],
    budget: float,
    trunks: Collection[Path] = (),
) -> list[Job]:
    """Return the jobs that fit into `budget` seconds, taken in order; jobs that do not fit are skipped.

    The time of a trunk counts for the first job that needs it, unless the trunk is in `trunks`.
    """
    chosen: list[Job] = []
    paid = set(trunks)
    for job in jobs:
        first, second = seconds[job.name]
        cost = (second if job.trunk in paid else first + second) / at_a_time[job.domain]
        if cost <= budget:
            budget -= cost
            chosen.append(job)
            if job.trunk is not None:
                paid.add(job.trunk)
    return chosen
