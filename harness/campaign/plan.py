"""The plan of a campaign as text: runs, work and time of each cell, then disk, memory and the order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.campaign.manifest import Job, Manifest
from harness.campaign.rates import Rate, one_of_each
from harness.campaign.schedule import Forecast
from harness.campaign.work import UNITS, assumed


def seconds_of(jobs: Sequence[Job], rates: Mapping[str, Rate]) -> dict[str, tuple[float, float]]:
    """Return {name of a job: seconds before and after its first boundary}."""
    return {
        job.name: (
            job.work.trunk_units / rates[job.experiment].per_second,
            job.work.fork_units / rates[job.experiment].per_second,
        )
        for job in jobs
    }


def once(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with no work after the boundary for those that adopt the last phase of an earlier job."""
    known, result = set[str](), []
    for job in jobs:
        repeated = job.last_phase is not None and job.last_phase in known
        if job.last_phase is not None:
            known.add(job.last_phase)
        result.append(replace(job, work=replace(job.work, fork=0, fork_tests=0)) if repeated else job)
    return result


def leaders(jobs: Sequence[Job], trunks: Sequence[Path] = ()) -> set[str]:
    """Return the names of the jobs that train phase 0: those without a trunk, and the first of each not in `trunks`."""
    known, found = set(trunks), set()
    for job in jobs:
        if job.trunk is None or job.trunk not in known:
            found.add(job.name)
            if job.trunk is not None:
                known.add(job.trunk)
    return found


def work_table(
    jobs: Sequence[Job],
    rates: Mapping[str, Rate],
    seconds: Mapping[str, tuple[float, float]],
    first: set[str],
) -> str:
    """Return a Markdown table with one row per cell, in the order of the campaign.

    first: names of the jobs that train phase 0.
    """
    sources = list(dict.fromkeys(rate.source for rate in rates.values()))
    lines = [
        "| experiment | runs | trained | evaluated | per second, one run | process hours | rate |",
        "| --- | ---: | ---: | ---: | ---: | ---: | :---: |",
    ]
    totals = [0, 0.0]
    for cell in one_of_each(jobs):
        mine = [job for job in jobs if job.experiment == cell.experiment]
        rate = rates[cell.experiment]
        trained = sum(job.work.fork + (job.name in first) * job.work.trunk for job in mine)
        tested = sum(job.work.fork_tests + (job.name in first) * job.work.trunk_tests for job in mine)
        hours = sum(seconds[j.name][1] + (j.name in first) * seconds[j.name][0] for j in mine) / 3600
        totals[0] += len(mine)
        totals[1] += hours
        unit = UNITS[cell.domain]
        lines.append(
            f"| {cell.experiment} | {len(mine)} | {short(trained)} {unit} | {short(tested)} | {short(rate.per_second)} "
            f"| {hours:.1f} | {'abcdefgh'[sources.index(rate.source)]} |"
        )
    lines.append(f"| all | {totals[0]} | | | | {totals[1]:.1f} | |")
    notes = [f"{'abcdefgh'[number]}: {source}" for number, source in enumerate(sources)]
    return "\n".join(
        [*lines, "", *notes, "Every method is taken to be as fast as `none`; evaluation counts a third."]
    )


def describe(
    manifest: Manifest,
    jobs: Sequence[Job],
    done: int,
    rates: Mapping[str, Rate],
    seconds: Mapping[str, tuple[float, float]],
    forecast: Forecast,
    first: set[str],
) -> str:
    """Return the text of the whole plan.

    done: number of runs finished before. first: names of the jobs that train phase 0.
    """
    domains = dict.fromkeys(job.domain for job in jobs)
    gpu = max((assumed()["gpu_gb"][d] * manifest.at_a_time[d] for d in domains), default=0)
    of_gpu = f"; of a GPU {gpu} GB (assumed)" if manifest.size == "paper" else ""
    trunks = ", ".join(manifest.delete_trunks) or "no domain"
    steps = ", ".join(f"{domain} {manifest.at_a_time[domain]}" for domain in domains)
    lines = [
        f"campaign {manifest.name}, size={manifest.size}: {len(jobs)} runs to train, {done} done before",
        *(
            [f"skipped, without size {manifest.size}: {', '.join(manifest.missing)}"]
            if manifest.missing
            else []
        ),
        "",
        work_table(jobs, rates, seconds, first),
        "",
        f"time    {span(forecast.seconds)} with this many runs at a time: {steps}",
        f"disk    {forecast.disk / 1e9:.1f} GB at the peak, {forecast.left / 1e9:.1f} GB at the end; trunks of {trunks} "
        "are deleted after their last run",
        f"memory  {forecast.memory / 1e9:.0f} GB at the peak{of_gpu}",
        "order   (hours at which the last run of a group ends)",
    ]
    groups = itertools.groupby(jobs, key=lambda job: (job.rank[:2], job.experiment))
    for ((turn, later), experiment), members in groups:
        group = list(members)
        end = max(forecast.ends[job.name] for job in group) / 3600
        methods = ", ".join(dict.fromkeys(job.folder.parent.name for job in group))
        part = "other methods" if later else "first methods"
        lines.append(f"  {end:7.2f} h  seed {turn + 1}, {part}: {experiment} ({methods})")
    return "\n".join(lines)


def short(number: float) -> str:
    """Return a number with three digits and a unit: 1234567 as 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def span(seconds: float) -> str:
    """Return a duration in seconds, hours or days, with its unit."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 3600:.0f} h ({seconds / 86400:.1f} days)"
