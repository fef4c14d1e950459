"""The data behind figures and tables, verdicts, report, status, export; no pictures are compared."""

import ast
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from synthetic_runs import boundary_report, task_lines, warm_start_lines, write_run

from analysis import (
    benchmark_tables,
    claims,
    curves,
    doctor,
    export,
    fig2,
    fig3,
    fig4,
    fig5,
    measures,
    paper,
    report,
    result_tables,
    status,
    style,
    summary,
    tables,
)
from analysis.load import load, load_exported
from analysis.stats import Estimate
from benchmarks import results_file
from fire_core.methods import available

ROOT = Path(__file__).resolve().parents[1]
NO_BENCHMARKS = Path("no such folder")
LEVELS = {"none": 0.7, "fire": 0.8, "full_reset": 0.82, "shrink_perturb": 0.75, "brand_new": 0.72}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for label, level in LEVELS.items():
        for seed in (1, 2, 3):
            lines = warm_start_lines(level + 0.001 * (label == "fire") * seed, seed)
            write_run(folder, "fig2a_cifar10_resnet18", label, seed, lines, boundary=moved(label))
            tasks = task_lines([0.9 - 0.04 * k * (label == "none") for k in range(20)], seed)
            write_run(folder, "random_label", label, seed, tasks, protocol="random_label")
            write_run(folder, "fig3_best", label, seed, losses(level, seed), data="a + b", protocol="")
            write_run(folder, "fig4a_asterix", label, seed, returns(level, seed), data="asterix", protocol="")
    for seed in (1, 2, 3):
        lines = warm_start_lines(0.81, seed)
        write_run(folder, "fig2a_cifar10_resnet18", "fire-iterations=20", seed, lines, boundary=moved("fire"))
    return folder


@pytest.fixture(scope="module")
def results(root):
    return load(root)


def moved(label):
    told = boundary_report(label)
    for row in told["rows"]:
        row["sfe_relative"] = {"none": 0.0, "fire": 0.5}.get(label, 1.0)
        row["sfe"] *= row["sfe_relative"]
    return told


def losses(level, seed):
    first = [{"phase": 0, "step": 10 * i, "val_loss_mix": 5.0, "val_loss_a": 4.0} for i in range(5)]
    return first + [
        {"phase": 1, "step": 50 + 10 * i, "val_loss_mix": 6.0 - level - 0.1 * i + 0.001 * seed}
        for i in range(10)
    ]


def returns(level, seed):
    first = [{"phase": 0, "step": 100 * i, "eval_return": 10.0 * i} for i in range(6)]
    return first + [
        {"phase": 1, "step": 500 + 100 * i, "eval_return": level * 100 * i + seed} for i in range(6)
    ]


def part_of(results, experiment):
    (part,) = curves.settings(results.select(experiment=experiment))
    return part


def test_panel_a_of_figure_2_is_the_mean_of_stage_2(results):
    rows = fig2.panel_data(part_of(results, "fig2a_cifar10_resnet18"))
    table = curves.band(rows[rows["label"] == "none"])
    assert table["x"].tolist() == list(range(1, 11))
    assert table["mean"].iloc[-1] == pytest.approx(0.702)
    assert (table["low"].iloc[-1], table["high"].iloc[-1]) == pytest.approx((0.701, 0.703))
    assert set(table["seeds"]) == {3}


def test_epochs_go_on_over_phases_and_boundaries_lie_at_their_ends(results):
    part = part_of(results, "fig2a_cifar10_resnet18")
    rows, unit = curves.with_progress(measures.curve(part.metrics, "test_accuracy"))
    assert unit == "epoch" and rows["x"].max() == 20 and curves.boundaries(rows) == [10.0]


def test_figure_3_counts_iterations_from_the_fork(results):
    rows = fig3.panel_data(part_of(results, "fig3_best"))
    assert rows["x"].min() == 0 and rows["x"].max() == 90 and set(rows["phase"]) == {1}


def test_figure_4_keeps_the_shared_half_once(results):
    rows = fig4.panel_data(part_of(results, "fig4a_asterix"), "eval_return")
    assert rows[rows["label"] == "none"]["x"].min() == 0
    assert rows[rows["label"] == "fire"]["x"].min() == 500


def test_figure_4_shows_the_level_of_random_actions(tmp_path):
    for seed in (1, 2):
        lines = returns(1.0, seed)
        lines[0]["random_return"] = 3.0 * seed
        write_run(tmp_path, "fig4a_asterix", "none", seed, lines, data="asterix", protocol="")
    _, axis = style.grid(1, width=4, height=3)
    part = part_of(load(tmp_path), "fig4a_asterix")
    fig4.draw_panel(axis[0], part, "eval_return", False)
    [level] = [line for line in axis[0].lines if line.get_label() == "random actions"]
    assert list(level.get_ydata()) == [4.5, 4.5]


def test_figure_5_iterations_and_moved_distance(results):
    part = part_of(results, "fig2a_cifar10_resnet18")
    assert fig5.iterations_data(part)["iterations"].tolist() == [10, 20]
    bars = (
        fig5.after_reset_data(part).query("metric == 'SFE / SFE of full reset'").set_index("label")["value"]
    )
    assert bars["fire"] == pytest.approx(0.5) and bars["full_reset"] == 1.0


def test_figure_5_says_of_how_many_matrices_a_sum_is_where_that_differs():
    columns = ["metric", "label", "value", "low", "high", "seeds", "matrices"]
    rows = [("DfI", label, 1.0, None, None, 1, count) for label, count in (("fire", 8), ("full_reset", 26))]
    for table, wanted in (
        (pd.DataFrame(rows, columns=columns), {"FIRE (8 matrices)", "full reset (26 matrices)"}),
        (pd.DataFrame(rows, columns=columns).assign(matrices=26), {"FIRE", "full reset"}),
    ):
        _, axes = style.grid(1, width=4, height=3)
        fig5.draw_bars(axes[0], table, "title", "DfI")
        assert {text.get_text() for text in axes[0].get_xticklabels()} == wanted


def test_seeds_measured_at_different_steps_are_binned():
    generator = np.random.default_rng(0)
    parts = [
        {"label": "none", "seed": seed, "x": x, "value": 2.0 * x}
        for seed in (1, 2)
        for x in generator.uniform(0, 1, 300)
    ]
    table = curves.band(pytest.importorskip("pandas").DataFrame(parts))
    assert len(table) == curves.BINS
    assert table["mean"].to_numpy() == pytest.approx(2 * table["x"].to_numpy(), abs=0.05)


def test_figures_are_the_same_bytes_twice(root, tmp_path):
    for name in ("a", "b"):
        assert fig2.main(["--root", str(root), "--out", str(tmp_path / name), "--formats", "svg"]) == 0
    first, second = (tmp_path / name / "fig2-small.svg" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    text = re.sub(r"<[^>]+>", " ", first.read_text())
    assert "<svg" in first.read_text() and "Date" not in text


def test_every_figure_and_the_absence_of_runs(root, tmp_path, capsys):
    for module in (fig3, fig4, fig5):
        assert (
            module.main(["--root", str(root), "--out", str(tmp_path), "--formats", "png", "--paper-curves"])
            == 0
        )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert fig4.main(["--root", str(empty)]) == 0
    assert "no finished run" in capsys.readouterr().out


def test_every_method_has_its_own_stable_look():
    looks = {name: style.look(name) for name in {*available(), *style.METHODS, "brand_new", "other_new"}}
    assert len({(look.colour, look.marker) for look in looks.values()}) == len(looks)
    assert style.look("brand_new") == style.look("brand_new")
    assert style.look("fire-iterations=20").colour == style.look("fire").colour
    assert style.ordered(["zzz", "none", "fire-x=1", "fire"]) == ["fire", "fire-x=1", "none", "zzz"]


def test_paper_end_values_are_the_last_points_and_hidden_ends_are_absent():
    assert paper.end_values("fig2a", "cifar10_resnet18")["fire"] == 0.8289
    assert paper.end_values("fig4b", "walk")["shrink_perturb"] == 779.4
    assert "cbp" not in paper.end_values("fig2b", "tiny_imagenet_vgg16")
    assert paper.end_values("", "random_label") == {}
    assert len(paper.cells()) == 17


@pytest.mark.parametrize("claim", [c for c in claims.CLAIMS if c.source not in claims.STAND_INS], ids=str)
def test_the_papers_own_numbers_bear_out_every_claim(claim):
    better, worse = claims.paper_values(claim)
    assert better is not None and worse is not None
    assert better < worse if claim.figure == "fig3" else better > worse


def test_verdicts(results):
    known = claims.settings(results)
    found = {
        (claim.experiment, claim.better, claim.worse): claims.judge(claim, known, "small")[0]
        for claim in claims.CLAIMS
    }
    assert found["fig2a_cifar10_resnet18", "fire", "none"].word == "holds"
    assert found["fig2a_cifar10_resnet18", "fire", "dash"].word == "not run"
    lower = found["fig3_best", "fire", "none"]
    assert lower.word == "holds" and lower.gain.value == pytest.approx(0.1)  # a lower loss is a gain
    assert found["fig3_best", "fire", "full_reset"].word == "the opposite holds"
    assert claims.word(Estimate(0.1, -0.1, 0.3, 3, "t"), "small") == "cannot be told apart"
    assert claims.word(Estimate(0.1, 0.05, 0.3, 3, "t"), "paper") == "reproduced"
    assert claims.word(Estimate(-0.1, -0.3, -0.05, 3, "t"), "paper") == "not reproduced"
    assert "one seed" in claims.word(Estimate(0.1, None, None, 1, "none"), "paper")


def test_learning_before_the_boundary_by_hand(tmp_path):
    for seed in (1, 2):
        lines = [{"phase": 0, "step": 0, "random_return": 1.0, "eval_return": 0.0}]
        lines += [
            {"phase": 0, "step": step, "eval_return": step / 10 + seed, "train_return": 2.0}
            for step in (50, 100)
        ]
        lines += [
            {"phase": 1, "step": step, "eval_return": 99.0, "train_return": 99.0} for step in (100, 200)
        ]
        for method in ("none", "fire"):
            write_run(tmp_path, "fig4a_x", method, seed, lines, data="x", protocol="")
    evaluation, training = result_tables.learning_table(load(tmp_path)).to_dict("records")
    assert evaluation["before the boundary"].startswith("11.5") and evaluation["level"].startswith("1.0")
    assert evaluation["level is"] == "random actions" and evaluation["gain"].startswith("+10.5")
    assert training["gain"].startswith("+1.0") and training["seeds"] == 2


def test_unknown_measures_and_bad_options_are_one_line(tmp_path, capsys):
    write_run(tmp_path, "fig3_x", "none", 1, [{"phase": 0, "step": 1, "speed": 1.0}], protocol="")
    (write_run(tmp_path, "fig3_x", "fire", 1, [], end="FAILED") / "FAILED").write_text("")
    assert summary.main(["--experiment", "fig3_x", "--root", str(tmp_path)]) == 1
    assert "none of the measures" in capsys.readouterr().err
    assert fig3.main(["--root", str(tmp_path)]) == 2
    assert "no run logged 'val_loss_mix'; logged: speed" in capsys.readouterr().err
    assert report.main(["--root", str(tmp_path)]) == 0
    write_run(tmp_path, "fig4a_x", "none", 1, returns(1.0, 1), protocol="")
    assert fig4.main(["--root", str(tmp_path), "--metric", "bogus"]) == 2
    assert "no run logged 'bogus'; logged: eval_return" in capsys.readouterr().err
    assert status.main(["--root", str(tmp_path), "--seeds", "a"]) == 2
    assert "--seeds 'a'" in capsys.readouterr().err
    assert status.main(["--root", str(tmp_path)]) == 0 and "(empty)" in capsys.readouterr().out


def test_moved_share_is_of_the_same_weights_reset(tmp_path):
    """Two boundaries: the full reset's own run starts the second one from other weights than FIRE's."""
    told = boundary_report("fire", 2)
    told["rows"] = [row | {"sfe": sfe, "sfe_relative": share} for row, sfe, share in
                    zip(told["rows"], (2.0, 3.0, 1.0), (0.5, 0.25, 0.5))]  # fmt: skip
    write_run(tmp_path, "fig2b_x", "fire", 1, warm_start_lines(0.8, 1), boundary=told)
    far = boundary_report("full_reset", 2)
    write_run(tmp_path, "fig2b_x", "full_reset", 1, warm_start_lines(0.8, 1), boundary=far)
    share = load(tmp_path).boundaries.set_index("label")["sfe_share"]
    assert share["fire"] == pytest.approx(6.0 / (4.0 + 12.0 + 2.0))


def test_a_claim_shows_the_values_that_its_gain_is_made_of():
    claim = claims.CLAIMS[0]
    ends = {claim.better: {1: 0.9, 2: 0.9}, claim.worse: {1: 0.8, 2: 0.8, 3: 1.4}}
    (verdict,) = claims.judge(claim, [claims.Setting(claim.experiment, "small", "x", True, ends)], "small")
    assert verdict.worse.value == pytest.approx(0.8) and verdict.gain.value == pytest.approx(0.1)


def test_shared_first_phases_are_counted_once(tmp_path):
    for method, seed in (("none", 1), ("fire", 1), ("none", 2)):
        run = write_run(tmp_path, "fig2a_x", method, seed, warm_start_lines(0.8, seed))
        (run / "timing.jsonl").write_text('{"images": 100}\n{"images": 200}\n{"boundary_seconds": 1.0}\n')
        meta = json.loads((run / "meta.json").read_text())
        (run / "meta.json").write_text(json.dumps(meta | {"trunk": f"trunk{seed}"}))
        trunk = tmp_path / "trunks" / f"trunk{seed}"
        trunk.mkdir(parents=True, exist_ok=True)
        (trunk / "timing.jsonl").write_text('{"images": 1000}\n')
    (trunk / "timing.jsonl").write_text('{"images": 1000, "train_seconds": 7.0}\n')
    costs = load(tmp_path).costs.set_index(["label", "seed"])
    assert costs.loc[("none", 2), "shared_seconds"] == 7.0 and np.isnan(
        costs.loc[("fire", 1), "shared_seconds"]
    )
    assert summary.sharing(load(tmp_path).finished, tmp_path) == (3 * 300 + 2 * 1000, 3 * 1300)


def test_summary_prints_and_fails_for_a_failed_run(root, tmp_path, capsys):
    arguments = [
        "--experiment",
        "fig2a_cifar10_resnet18,random_label",
        "--root",
        str(root),
        "--out",
        str(tmp_path),
    ]
    assert summary.main(arguments) == 0
    text = capsys.readouterr().out
    row = next(
        line for line in text.splitlines() if line.startswith("| none (continue)") and "0.7020" in line
    )
    assert "[0.6995, 0.7045]" in row
    assert "brand new" in text and "summary.png" in text and "Only 3 seed" in text
    assert (tmp_path / "summary.md").exists()
    assert summary.main([*arguments, "--seeds", "1,2,3,4", "--methods", "none,fire"]) == 1
    assert "random_label fire seed 4: missing" in capsys.readouterr().err


def test_a_new_method_shows_everywhere(results):
    part = part_of(results, "random_label")
    assert "brand_new" in summary.summarise(part)["label"].tolist()
    assert "brand new" in result_tables.end_value_table(part)["method"].tolist()
    assert "brand new" in result_tables.contrast_table(part)["FIRE minus"].tolist()


def test_mixed_commits_and_sizes_are_said(tmp_path):
    for seed, commit in ((1, "aaaaaaaaaa"), (2, "bbbbbbbbbb")):
        write_run(
            tmp_path,
            "random_label",
            "none",
            seed,
            task_lines([0.5] * 4, seed),
            protocol="random_label",
            commit=commit,
        )
    write_run(
        tmp_path, "random_label", "none", 3, task_lines([0.5] * 4, 3), protocol="random_label", size="paper"
    )
    results = load(tmp_path)
    assert "commits MIXED" in curves.provenance(results.runs) and "sizes MIXED" in curves.provenance(
        results.runs
    )
    one = results.runs[results.runs["commit"] == "aaaaaaaaaa"]
    other = one.assign(experiment="label_noise", commit="cccccccccc")
    both = curves.provenance(pd.concat([one, other]))
    assert "commits, one an experiment: aaaaaaaaaa, cccccccccc" in both
    assert [set(part.runs["size"]) for part in curves.settings(results)] == [{"paper"}, {"small"}]
    text = tables.reproduced(results, NO_BENCHMARKS)
    assert "commit MIXED: aaaaaaaaaa, bbbbbbbbbb" in text


def test_reproduced_says_what_was_not_run_and_is_deterministic(results):
    text = tables.reproduced(results, NO_BENCHMARKS)
    assert text == tables.reproduced(results, NO_BENCHMARKS)
    assert "fig4b_run" in text and "| not run" in text
    assert (
        "-m experiment=fig2a_cifar10_resnet18 size=small method=fire,none,full_reset,shrink_perturb,brand_new"
        in text
    )
    assert "seed=1,2,3" in text


def test_export_and_back_gives_the_same_tables(results, tmp_path):
    export.export(results, tmp_path)
    again = load_exported(tmp_path)
    assert tables.reproduced(again, NO_BENCHMARKS) == tables.reproduced(results, NO_BENCHMARKS)
    export.export(results.select(experiment="random_label"), tmp_path)
    assert len(load_exported(tmp_path).runs) == len(again.runs)


def test_every_table_in_three_formats(results, tmp_path):
    names = {path.name for path in tables.write_all(results, tmp_path)}
    assert "convergence.tex" in names
    assert {"claims.md", "claims.csv", "claims.tex", "costs.csv", "ablations.tex"} <= names
    assert r"fig2a\_cifar10" in (tmp_path / "claims.tex").read_text()
    assert "iterations=20" in (tmp_path / "ablations.md").read_text()


def test_benchmarks_replace_their_own_lines_and_become_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    slow = results_file.loop_row(
        "dqn", "acting", "steps/s", "cpu", [100.0, 200.0, 300.0], [100.0, 100.0, 100.0]
    )
    other = results_file.loop_row("sac", "updates", "updates/s", "cpu", [5.0], [10.0])
    results_file.merge_loops([slow, other])
    results_file.merge_loops([slow | {"ratio": 4.0, "bytes": 1}])
    ((benchmark, table, origin),) = benchmark_tables.tables_of(tmp_path)
    assert benchmark.file == "bench_loops" and "Machine " in origin
    assert dict(zip(table["domain"], table["ratio"])) == {"sac": "0.50x", "dqn": "4.00x"}
    assert slow["ratio"] == 2.0 and slow["ours"] == 200.0
    assert dict(zip(table["domain"], table["lowest, highest"]))["dqn"] == "1.00x, 3.00x"
    assert [path.name for path in tmp_path.iterdir()] == ["bench_loops.csv"]


def test_shipped_benchmarks_are_in_reproduced(results):
    text = tables.reproduced(results)
    assert "### Convergence by kind of matrix" in text and "### Speed of the solvers" in text
    assert re.search(r"\| fire +\| +[\d.]+ \| +\d+ \| +0\.06 \| +55 \|", text)  # the paper's Table 1


def test_report_is_one_file_with_every_matrix(root, tmp_path):
    path = tmp_path / "report.html"
    assert report.main(["--root", str(root), "--out", str(path)]) == 0
    text = path.read_text()
    assert not re.search(r'(src|href)="(http|/|[a-z]+\.)', text)
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.S).group(1))
    assert any(row["name"] == "layer2.weight" for entry in data for row in entry["rows"])
    assert text.count("data:image/png;base64") >= 4


def test_status_knows_the_missing(tmp_path, capsys):
    write_run(tmp_path, "random_label", "none", 1, [])
    write_run(tmp_path, "random_label", "none", 2, [], end="FAILED")
    write_run(tmp_path, "random_label", "fire", 1, [], end=None)
    assert status.main(["--root", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert (
        "missing: random_label small fire seed 2" in text and "failed: random_label small none seed 2" in text
    )
    assert "loss is nan" in text and "never run: " in text


@pytest.mark.parametrize("script", ["language/train.py", "rl/dqn/train.py", "rl/sac/train.py"])
def test_doctor_looks_for_what_the_script_needs(script):
    text = (ROOT / script).read_text()
    needed = ast.literal_eval(re.search(r"^needs(\(.*\))$", text, re.MULTILINE)[1])
    domain = needed[0]
    assert domain in script
    assert set(needed[1:]) <= {module for module, _, _, needed in doctor.PACKAGES[domain] if needed}


def test_doctor_names_the_command_that_mends(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_installed", lambda module: module != "ale_py")
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "dqn: cannot start" in text and "pip install -e '.[dqn]'" in text


@pytest.mark.slow
def test_five_minutes_notebook_runs_at_smoke(monkeypatch):
    monkeypatch.setenv("FIRE_SIZE", "smoke")
    space = SimpleNamespace(**runpy.run_path("analysis/notebooks/fire_in_five_minutes.py"))
    assert set(space.rows) >= {"none", "fire", "fire_exact", "rescale", "random_orthogonal"}
    assert space.rows["fire_exact"][1] < space.rows["none"][1]


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_figure_notebooks_run(number, root, monkeypatch):
    monkeypatch.setenv("FIRE_RUNS", str(root))
    space = runpy.run_path(f"analysis/notebooks/figure_{number}.py")
    assert space["parts"]
