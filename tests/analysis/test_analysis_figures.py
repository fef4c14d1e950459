"""Estimates, the figures and the documents that are drawn from them; no pictures are compared."""

import html
import json
import re

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from synthetic_runs import CELL, boundary_report, write_run, write_runs

from analysis import __main__ as command
from analysis import estimates, measures, names, paper, plot
from analysis.figures import curves, dial, fig5, studies, timing
from analysis.notebooks import __main__ as notebooks
from analysis.runs import RESULTS, Results, at_most, load, settings
from analysis.tables import TABLES, Material, ends
from benchmarks import measuring
from benchmarks.measuring import record
from benchmarks.speed import rates
from fire_core.errors import UserError
from fire_core.methods import available


@pytest.fixture(scope="module")
def frame(results):
    return estimates.frame(results)


def part_of(results, experiment):
    (part,) = settings(results.select(experiment=experiment))
    return part


def points_of(results, experiment):
    part = part_of(results, experiment)
    return curves.points(part, measures.of(part)[0]).rows


def row_of(frame, label, reference):
    keys = {"experiment": CELL, "label": label, "reference": reference, "headline": True}
    (row,) = frame[(frame[list(keys)] == keys).all(axis=1)].to_dict("records")
    return row


def test_estimates_by_hand(frame):
    row = row_of(frame, "fire", "none")
    assert row["mean"] == pytest.approx(0.804)
    assert row["difference"] == pytest.approx(0.102) and row["pairs"] == 3  # (.101 + .102 + .103) / 3
    half = pytest.approx(4.302653 * 0.001 / np.sqrt(3), abs=1e-6)
    assert row["difference_high"] - row["difference"] == half
    assert row_of(frame, "fire-iterations=20", "unchanged")["difference"] == pytest.approx(0.008)
    (share,) = frame[(frame["metric"] == "sfe_share") & (frame["label"] == "fire")]["mean"]
    assert share == pytest.approx((1.0 + 1.5 + 1.0) / 9)  # of the same weights reset


def test_the_reference_has_the_same_overrides_where_it_exists(tmp_path):
    levels = {"none": 0.5, "none-model.x=1.0": 0.6} | {f"fire-model.x={x}": 0.8 for x in (1, 2, 3)}
    write_runs(tmp_path, CELL, levels)
    write_runs(tmp_path, CELL, {"none-model.x=3": 0.5}, end="FAILED")
    write_runs(tmp_path, CELL, {"redo": 0.5}, [2, 3])
    write_runs(tmp_path, CELL, {"dash": 0.5}, [3])
    frame = estimates.frame(load(tmp_path))
    gaps = [row_of(frame, f"fire-model.x={x}", "none")["difference"] for x in (1, 2)]
    assert gaps == pytest.approx([0.2, 0.3])
    assert row_of(frame, "fire-model.x=3", "")["n"] == 2, "no comparison with another setting"
    assert "2 (1 of none)" in ends(frame, "test_accuracy")["seeds"].tolist()
    alone = row_of(frame, "dash", "")
    assert (alone["n"], alone["mean"]) == (1, pytest.approx(0.503))


def test_the_papers_own_numbers_bear_out_every_claim():
    for claim in paper.claims().itertuples():
        if claim.experiment in paper.panels():
            assert paper.gain(claim.experiment, claim.better, claim.worse) > 0, claim
        else:
            assert not paper.end_values(claim.experiment), claim


def test_figure_5_sums_the_matrices_that_fire_changes(tmp_path):
    """FIRE changes one matrix, a full reset three; DfI before is 5, 6 and 7 and after 0.5 each, as in `boundary_report`."""
    report = boundary_report("fire")
    for label, matrices in (("fire", 1), ("full_reset", 3), ("none", 0)):
        write_runs(tmp_path, "fig2a_x", {label: 0.5}, boundary=report | {"rows": report["rows"][:matrices]})
    results = load(tmp_path)
    row = results.boundaries.set_index(["label", "seed"]).loc[("full_reset", 1)]
    assert (row["matrices"], row["dfi_after"]) == (3, 1.5)
    assert (row["common_matrices"], row["common_dfi_before"], row["common_dfi_after"]) == (1, 5.0, 0.5)
    bars = fig5.bars(estimates.frame(results), part_of(results, "fig2a_x"))
    bars = bars[bars["metric"] == "common_dfi_after"].set_index("label")["mean"]
    assert bars.to_dict() == {"fire": 0.5, "full_reset": 0.5, "none": 5.0}


def test_axes_count_from_the_fork_and_keep_a_shared_half_once(results):
    assert sorted(set(points_of(results, CELL)["x"])) == list(range(1, 11))  # the epochs of stage 2
    rows = points_of(results, "fig3_best")
    assert rows["x"].min() == 0 and rows["x"].max() == 90 and set(rows["phase"]) == {1}
    starts = points_of(results, "fig4a_asterix").groupby("label")["x"].min()  # in thousands of steps
    assert (starts["none"], starts["fire"]) == (0, 0.5)
    part = part_of(results, "fig3_best")
    steps = part.metrics["step"] + 20 * (part.metrics["seed"] == 2)  # this seed has a later boundary
    late = Results(part.runs, part.metrics.assign(step=steps), part.boundaries)
    rows = curves.points(late, measures.of(part)[0], paper=False).rows
    assert rows.groupby("seed")["x"].agg(list).map(tuple).nunique() == 1


def test_figure_5_reads_the_scan_and_names_every_number_of_iterations(results, frame):
    part = part_of(results, CELL)
    assert fig5.iterations(frame, part)["iterations"].tolist() == [10, 20]
    _, axis = plot.plt.subplots()
    fig5.draw_iterations(axis, part, frame, part)
    assert [text.get_text() for text in axis.get_xticklabels()] == ["10", "20"]


def test_every_panel_of_the_paper_has_its_place(results):
    for run, panels in ((CELL, 8), ("fig3_best", 3), ("fig4a_asterix", 6)):
        figure = curves.draw_paper(run[:4], [part_of(results, run)])
        empty = [axis for axis in figure.axes if any(text.get_text() == "not run" for text in axis.texts)]
        assert len(empty) == panels - 1


def test_figure_4_fills_panels_from_a_smaller_size(tmp_path):
    returns = [{"phase": p, "step": 10 + 10 * p, "eval_return": 9.0 * p} for p in (0, 1)]
    for run in ("fig4a_asterix medium", "fig4a_asterix small", "fig4b_walk small"):
        experiment, size = run.split()
        write_run(tmp_path, experiment, "none", 1, returns, size=size, data=experiment)
    results = load(tmp_path)
    sizes = {part.first["experiment"]: part.first["size"] for part in settings(at_most(results, "medium"))}
    assert sizes == {"fig4a_asterix": "medium", "fig4b_walk": "small"}
    assert {part.first["size"] for part in settings(at_most(results, "small"))} == {"small"}
    assert command.main(f"figures fig4 --size medium --root {tmp_path} --out {tmp_path}/out".split()) == 0
    assert "data: fig4a_asterix, fig4b_walk" in (tmp_path / "out" / "fig4-medium.md").read_text()


def test_the_scaling_study_pairs_methods_at_each_number_of_images(tmp_path):
    few, wide = (f"-data.train_per_class={more}" for more in ("500", "1000-model.width=16"))
    levels = {f"none{few}": 0.5, f"full_reset{few}": 0.6, f"fire{few}": 0.65}
    levels |= {f"none{wide}": 0.5, f"full_reset{wide}": 0.4, "none": 0.1}
    write_runs(tmp_path, "scaling_warm_start_long", levels)
    results = load(tmp_path)
    parts = settings(results)
    rows = studies.scaling(parts)
    assert rows["images"].tolist() == [5000, 5000, 10_000] and set(rows["n"]) == {2}
    assert rows["mean"].round(6).tolist() == [0.05, 0.1, -0.1]
    assert rows["study"].str.endswith("times as long, model.width=16").tolist() == [False, False, True]
    assert len(studies.draw_scaling(parts).axes) == 2
    cells = TABLES["scaling"](Material(results)).set_index(["study", "images"])
    assert cells.loc[("second stage four times as long", "5,000"), "FIRE minus full reset"].endswith(" (2)")


def test_the_map_of_layers_shows_each_gain_and_greys_what_is_not_clear(tmp_path):
    levels = {"none": 0.5, "fire": 0.7, "fire-method.targets=name:head": 0.55}
    write_runs(tmp_path, "sensitivity_resnet18", levels | {"fire-method.targets=layer1.0.conv1": 0.6})
    for seed, level in ((1, 0.4), (2, 0.45)):
        write_runs(tmp_path, "sensitivity_resnet18", {"fire-method.targets=layer2.0.conv2": level}, [seed])
    results = load(tmp_path)
    shown = studies.draw_layers([results]).axes[0].texts
    assert {text.get_text() for text in shown} == {"+0.100", "-0.075", "head\n+0.050", "all\n+0.200"}
    assert [text.get_text() for text in shown if text.get_color() == "#8A8A8A"] == ["-0.075"]
    assert studies.draw_layers([results.select(label="fire")]) is None


DIAL = {"fire_exact": 0.7, "fire": 0.69, "rescale": 0.68, "cap-high=2": 0.75, "cap-high=0.5": 0.55}
DIAL |= {"spectral_clip-high=1.5-low=0.6667": 0.8, "spectral_clip-high=inf-low=0.25": 0.45}
AT_WIDTH = {"both": {1: 0.2, 1.5: 0.3}, "large": {0.5: 0.05, 2: 0.25}, "small": {4: -0.05}}


def test_the_dial_shows_the_gain_at_each_width_with_the_seeds_that_turned_it(tmp_path):
    others = {"spectral_clip-high=4-low=0.5": 0.9, "cap-high=2-optimizer_state.x=1": 0.9, "none": 0.5}
    write_runs(tmp_path, CELL, others | DIAL)
    write_runs(tmp_path, CELL, {"fire": 0.99, "none": 0.5}, [3])
    given = f"figures dial --root {tmp_path} --out {tmp_path} --formats png".split()
    assert command.main(given) == 0 and (tmp_path / "dial-small.png").exists()
    (axis,) = dial.draw(settings(load(tmp_path))).axes
    curves_of = {line.get_label().split()[0]: line for line in axis.lines if line.get_marker() != "None"}
    for place, side in enumerate(AT_WIDTH):
        shown = {round(x * 1.03 ** (1 - place), 6): round(y, 6) for x, y in curves_of[side].get_xydata()}
        assert shown == AT_WIDTH[side]
    levels = {line.get_label(): line.get_ydata()[0] for line in axis.lines if line.is_dashed()}
    assert levels == pytest.approx({"FIRE": 0.19, "FIRE exact": 0.2, "rescale": 0.18})  # without seed 3
    table = dial.table(settings(load(tmp_path)))
    sides = ["0.667 to 1.5", "at most 0.5", "at most 2", "at least 0.25"]
    assert table["setting"].tolist() == ["FIRE", "FIRE exact", "rescale", *sides]
    assert set(table["seeds"]) == {2}


def test_timing_shows_each_share_of_a_phase(tmp_path):
    """A phase takes 100 steps; with a shift, the difference is from `none` with the same shift."""
    write_runs(tmp_path, "fig2a_cifar10_resnet18", {"none": 0.5, "fire": 0.7, "rescale": 0.9})
    mistimed = {"fire-trigger.first=90": 0.6, "fire-trigger.first=150": 0.65}
    write_runs(tmp_path, "mistiming_resnet18", mistimed, [1])
    for label, level in {"none-gradual": 0.6, "fire-gradual": 0.55}.items():
        write_runs(tmp_path, "gradual_resnet18", {label: level}, overrides=["gradual=0.5"])
    write_runs(tmp_path, "gradual_mine", {"fire": 0.5})  # of which nothing is known
    parts = settings(load(tmp_path))
    assert timing.draw([part for part in parts if not part.first["experiment"].startswith("fig2a")]) is None
    table = timing.table(parts).set_index(["study", "method"])
    cells = table.map(lambda text: text.split()[0] if isinstance(text, str) else text)
    assert cells.loc[("gradual", "none (continue)"), [0.0, 0.5]].tolist() == ["0.5015", "0.6015"]
    assert cells.loc[("gradual", "FIRE minus none"), [0.0, 0.5]].tolist() == ["+0.2000", "-0.0500"]
    mistimed = cells.loc[("mistiming", "FIRE minus none")]
    assert mistimed[["seeds", -0.1, 0.0, 0.5]].tolist() == [1, "+0.1000", "+0.2000", "+0.1500"]
    _, mistimed = timing.draw(parts).axes
    (fire,) = (line for line in mistimed.lines if line.get_label() == "FIRE")
    assert fire.get_ydata().round(3).tolist() == [0.601, 0.701, 0.651]


def test_the_controls_are_judged_against_kept_moments_where_these_ran(tmp_path):
    levels, scattered = {"none": 0.6, "clear": 0.6}, {"fire": 0.7, "full_reset": 0.7, "rewarm": 0.5}
    seeds = 1, 2, 3, *dial.CONTROLLED
    for seed in seeds:
        more = {label: end + 0.01 * (seed % 3) for label, end in scattered.items()}
        write_runs(tmp_path, CELL, levels | more, [seed])
    write_runs(tmp_path, CELL, {"none-keep": 0.51}, seeds, overrides=["optimizer_state=keep"])
    results = load(tmp_path)
    table = dial.controlled(settings(results), results).set_index("control")
    verdicts = table.map(lambda cell: cell.rpartition(", ")[2])
    told = {"FIRE > untreated": "holds", "control > untreated": "holds", "FIRE > control": "holds"}
    assert verdicts.loc["clear", list(told)].to_dict() == told
    assert verdicts.loc["rewarm", list(told)].to_dict() == told | {"control > untreated": "not decided"}
    assert table.loc["rewarm", "FIRE > untreated"].startswith("+0.1990 [")
    # open until all of their seeds are done; a panel whose premise is not known is judged, too
    unfinished = results.filtered(lambda frame: frame["label"].ne("rewarm") | frame["seed"].lt(9))
    again = dial.controlled(settings(unfinished), unfinished).set_index("control")
    assert again.loc["rewarm", "control > untreated"].endswith("open")
    apart = results.select(label=["clear", "rewarm", "none-keep"])
    assert dial.controlled(settings(apart), results).set_index("control").equals(table)
    without_premise = results.select(label=["clear", "rewarm", "none-keep", "none", "fire"])
    assert dial.controlled(settings(results), without_premise).set_index("control").equals(table)


def test_figures_are_the_same_bytes_twice_and_say_where_they_come_from(root, tmp_path):
    for name in ("a", "b"):
        given = f"figures fig2 --root {root} --out {tmp_path / name} --formats svg png"
        assert command.main(given.split()) == 0
    for ending in ("svg", "png", "md"):
        first, second = ((tmp_path / name / f"fig2-small.{ending}").read_bytes() for name in ("a", "b"))
        assert first == second and b"commit: 0123456789" in first
    assert matplotlib.image.imread(tmp_path / "a" / "fig2-small.png").shape[1] > 1000


def test_every_method_has_its_own_stable_look():
    looks = {name: plot.look(name) for name in {*available(), *plot.METHODS, "brand_new", "other_new"}}
    assert len({(look.colour, look.marker) for look in looks.values()}) == len(looks)
    assert plot.look("fire", {"method.iterations": "20"}).colour == plot.look("fire").colour
    assert names.ordered(["zzz", "none", "fire"]) == ["fire", "none", "zzz"]


def test_commands_without_runs(root, tmp_path, capsys):
    write_runs(tmp_path / "few", "fig2a_cifar10_resnet18", {"none": 0.3, "fire": 0.4})
    write_runs(tmp_path / "few", "scaling_warm_start", {"fire-data.train_per_class=500": 0.4})
    write_runs(tmp_path / "few", "random_label", {"redo": 0.4})
    for folder, figures in ((root, ["dial"]), (tmp_path / "few", ["rivals", "scaling", "readme"])):
        assert command.main(["figures", *figures, "--root", str(folder), "--out", str(tmp_path / "out")]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said == [f"{name}: no run in '{folder}' that it shows" for name in figures]
        assert not (tmp_path / "out").exists()
    assert command.main(["figures", "--root", str(tmp_path)]) == 0
    assert "fig4: no finished run" in capsys.readouterr().out
    with pytest.raises(UserError, match="no finished run"):
        command.main(["export", "--root", str(tmp_path)])


def test_a_sweeps_table_names_what_is_missing(root, tmp_path, capsys):
    assert command.main(["tables", "--experiment", CELL, "random_label", "--root", str(root)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\| none \(continue\) +\| 0\.7020 \[0\.6995, 0\.7045\]", text) and "brand new" in text
    out = root / "summary" / f"{CELL}+random_label" / "small"
    assert (out / "table.md").exists() and (out / "figure.png").exists()
    assert "random_label: FIRE > none (continue): holds (gain +0." in text
    assert text.index("figure: ") < text.index("FIRE > none (continue): holds")
    for seed, level in ((1, 0.4), (2, 0.42), (3, 0.46)):
        write_runs(tmp_path / "open", CELL, {"none": 0.3, "fire": level, "full_reset": 0.45}, [seed])
    write_runs(tmp_path / "open", CELL, {"shrink_perturb": 0.35}, [1])
    command.main(["tables", "--experiment", CELL, "--root", str(tmp_path / "open")])
    assert "open until at least two seeds of every method are done" in capsys.readouterr().out
    for seed in (1, 2):
        lines = [{"phase": 0, "step": 1, "speed": 1.0 * seed}]
        write_run(tmp_path / "runs", "fig3_x", "none", seed, lines, protocol="")
    (write_run(tmp_path / "runs", "fig3_x", "fire", 1, [], end="FAILED") / "FAILED").write_text("")
    write_run(tmp_path / "one", CELL, "fire-iterations=5", 1, [{"phase": 0, "step": 1, "test_accuracy": 0.5}])
    write_run(tmp_path / "one", CELL, "none", 1, [], end="FAILED")
    write_runs(tmp_path / "torn", CELL, {"none": 0.3, "fire": 0.4}, [1])
    (write_run(tmp_path / "torn", CELL, "fire-iterations=5", 1, []) / "boundary_1.json").write_text("{")
    for experiment, folder in ((CELL, "one"), (CELL, "torn"), ("fig3_x", "runs")):
        assert command.main(["tables", "--experiment", experiment, "--root", str(tmp_path / folder)]) == 1
    told = capsys.readouterr().err
    assert "no known measure" in told and "fig3_x fire seed 2: missing" in told


def test_benchmarks_replace_their_own_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    row = {"domain": "dqn", "setting": "acting", "ratio": 2.0}
    other = {"domain": "sac", "setting": "updates", "ratio": 0.5}
    for line in (row, other, row | {"ratio": 4.0, "bytes": 1}):
        record("bench_loops", line, ("domain", "setting"))
    table = pd.read_csv(tmp_path / "bench_loops.csv")
    assert dict(zip(table["domain"], table["ratio"])) == {"sac": 0.5, "dqn": 4}


def test_rates_are_those_of_the_windows_in_which_the_count_grows():
    windows = [{"step": n, "updates": u, "seconds": 2.0} for n, u in ((4, 0), (8, 0), (12, 10), (16, 30))]
    boundary = {"phase": 1, "boundary_seconds": 9.0}
    assert rates("updates", [*windows[:2], boundary, *windows[2:]]) == [5.0, 10.0]


def outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [output for cell in cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("name", sorted(path.stem for path in notebooks.HERE.glob("*.ipynb")))
def test_committed_notebooks_have_small_pictures_and_no_errors(name):
    path = notebooks.HERE / f"{name}.ipynb"
    assert any("image/png" in output.get("data", {}) for output in outputs(path))
    assert path.stat().st_size < 1_000_000
    assert not any(output["output_type"] == "error" for output in outputs(path))
    assert "/work" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [2, 3, 4])
def test_the_notebook_of_a_figure_shows_the_verdicts_of_reproduced(number):
    text = (RESULTS.parents[1] / "REPRODUCED.md").read_text()
    table = text.partition("<!-- table claims -->")[2].partition("<!-- end")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]
    rows = [cells for cells in lines if cells[0].startswith(str(number))]
    path = notebooks.HERE / f"figure_{number}.ipynb"
    shown = html.unescape("".join("".join(o.get("data", {}).get("text/html", "")) for o in outputs(path)))
    assert len(rows) > 5
    assert not [row for row in rows if f">{row[4]}<" not in shown or f">{row[-1]}<" not in shown]


def test_the_notebook_of_figure_5_runs_on_other_runs(root, monkeypatch, tmp_path):
    monkeypatch.setenv("FIRE_RUNS", str(root))
    pytest.importorskip("nbclient")
    path = notebooks.execute("figure_5", tmp_path)
    assert sum("image/png" in output.get("data", {}) for output in outputs(path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fire_in_five_minutes", "try_before_you_treat", "failures"])
def test_the_other_notebooks_run(name, monkeypatch, tmp_path):
    monkeypatch.setenv("FIRE_SIZE", "smoke")
    pytest.importorskip("nbclient")
    assert outputs(notebooks.execute(name, tmp_path))
