"""Run folders read back: exact numbers, and everything that is not whole is named."""

import json
import os
import shutil
from pathlib import Path

import pandas as pd
import pytest
from synthetic_runs import CELL, task_lines, warm_start_lines, write_run, write_runs

from analysis import measures, plot, runs
from analysis.export import export, thin
from analysis.rendering import markdown, plain
from analysis.runs import load, load_exported, open_results, own_data, settings
from fire_core.errors import UserError
from harness import status
from harness.runs.folders import read_config, without_seed


@pytest.fixture
def root(tmp_path):
    write_runs(tmp_path, CELL, {"none": 0.7, "fire": 0.8}, (1, 2, 3))
    return tmp_path


def test_unfinished_failed_and_torn_are_named_and_left_out(root, capsys):
    write_run(root, CELL, "dash", 1, warm_start_lines(0.5, 1), end="FAILED")
    write_run(root, CELL, "dash", 2, warm_start_lines(0.5, 2), end=None)
    (write_run(root, CELL, "dash", 3, [], end="FAILED") / "FAILED").write_text("")
    with (write_run(root, CELL, "snr", 1, warm_start_lines(0.5, 1)) / "metrics.jsonl").open("a") as stream:
        stream.write('[1, 2]\n{"step": "x", "test_accuracy": 9.0}\n{"step": 998, "value": 1.0}\n')
        stream.write('{"step": 999, "test_accuracy": NaN}\n{"a\n')
    cut = write_run(root, CELL, "redo", 1, warm_start_lines(0.5, 1)[:3])
    (cut / "summary.json").write_text('{"steps": 80}')
    results = load(root)
    assert sorted(results.metrics["label"].unique()) == ["fire", "none", "snr"]
    assert len(results.metrics.query("label == 'snr'")) == 21
    text = "\n".join(results.problems)
    assert "loss is nan at step 7" in text and "unfinished" in text and "3 unreadable line(s)" in text
    assert "and the run at 80" in text
    status.main(["--root", str(root)])
    told = capsys.readouterr().out
    assert f"missing: {CELL} small snr seed 2" in told and f"failed: {CELL} small dash seed 1" in told
    assert "loss is nan" in told and "(empty)" in told and "never run: " in told


def test_the_commit_of_a_shared_first_phase_and_of_every_start_is_told(tmp_path):
    earlier = [{"commit": "c" * 40, "dirty": False}]
    write_runs(tmp_path, "label_noise", {"fire": 0.5}, [1], commit="b" * 40, trunk="abc", earlier=earlier)
    (trunk := tmp_path / "trunks" / "abc").mkdir(parents=True)
    (trunk / "meta.json").write_text(json.dumps({"commit": "a" * 40, "dirty": True}))
    row = load(tmp_path).runs.iloc[0]
    assert (row["commit"], row["trunk_commit"], row["dirty"]) == ("cccccccccc bbbbbbbbbb", "aaaaaaaaaa", True)
    text = plot.provenance(load(tmp_path).runs)
    assert "shared first phase, commit: aaaaaaaaaa" in text and "1 of 1 runs from a changed checkout" in text


DAMAGE = {
    "config.yaml is a list": ("config.yaml", b"- 1\n- 2\n"),
    "config.yaml is nested deeply": ("config.yaml", b"[" * 100_000 + b"]" * 100_000),
    "rows of a boundary are numbers": ("boundary_1.json", b'{"phase": 1, "rows": [1, 2]}'),
    "meta.json holds other types": ("meta.json", b'{"domain": "x", "earlier": 3, "method": [1]}'),
    "metrics are nested deeply": ("metrics.jsonl", b"[" * 100_000 + b"\n"),
    "metrics.jsonl is a pipe": ("metrics.jsonl", os.mkfifo), "RUNNING is a pipe": ("RUNNING", os.mkfifo),
    "config.yaml is a folder": ("config.yaml", Path.mkdir),
}  # fmt: skip


@pytest.mark.timeout(60)  # a pipe that is read never ends
@pytest.mark.parametrize("damage", DAMAGE)
def test_one_damaged_run_hides_no_other(root, damage):
    name, content = DAMAGE[damage]
    end = None if name in ("RUNNING", "FAILED") else "DONE"
    folder = write_run(root, CELL, "dash", 1, warm_start_lines(0.5, 1), end=end)
    if callable(content):
        (folder / name).unlink(missing_ok=True)
        content(folder / name)
    else:
        (folder / name).write_bytes(content)
    status.main(["--root", str(root), "--detail"])
    results = load(root)
    assert len(results.finished.query("label != 'dash'")) == 6 and len(results.problems) <= 1
    assert all("dash" in problem and "\n" not in problem for problem in results.problems)


def test_text_from_files_stays_text():
    label = "fire-x=<script>alert(1)</script>|[a](http://b)\n\x1b[2J```"
    cell = markdown(pd.DataFrame({"method": [plot.look(label).name]})).splitlines()[-1]
    assert "<script" not in cell and "](" not in cell and "\x1b" not in cell and "```" not in cell
    assert cell.count("|") - cell.count("\\|") == 2
    assert plain("p <0.001 and a < b") == "p <0.001 and a < b"


def measured(root, experiment, lines):
    """The measures of a run with these lines, the headline first."""
    write_run(root, experiment, "none", 1, lines)
    (part,) = settings(load(root, [experiment]))
    return [measures.values(part.metrics, each)["none"][1] for each in measures.of(part)]


def test_measures_by_hand(tmp_path):
    """The last quarter of eight tasks; the end and the value after the boundary; of a game, the last tenth, too."""
    tasks = task_lines([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], 0)
    assert measured(tmp_path, "random_label", tasks) == [pytest.approx((0.3 + 0.2) / 2)]
    noise = [{"phase": p, "step": 10 + 10 * p, "test_accuracy": a} for p, a in ((0, 0.5), (1, 0.8))]
    noise.insert(1, {"phase": 1, "step": 10, "after_test_accuracy": 0.3})
    assert measured(tmp_path, "label_noise", noise) == [0.8, 0.3]
    game = [{"phase": s // 51, "step": s, "train_return": s, "eval_return": s} for s in range(10, 110, 10)]
    game.insert(5, {"phase": 1, "step": 50, "after_eval_return": 55})
    assert measured(tmp_path, "fig4a_asterix", game) == [95, 100, 55, 50]  # tail, end, after, before


def test_an_export_is_read_back_and_keeps_other_experiments(root, tmp_path):
    out = tmp_path / "out"
    for seed in (1, 2):
        write_run(root, "random_label", "none", seed, task_lines([0.5] * 4, seed))
    # the mean over all values of this metric counts, so none is thinned
    returns = [{"phase": 0, "step": s, "train_return": s} for s in range(300)]
    write_run(root, "fig4a_asterix", "none", 1, returns)
    results = load(root)
    paths, again = export(results, out), load_exported(out)
    runs_of = results.runs.sort_values(["experiment", "size", "label", "seed"], ignore_index=True)
    assert again.runs.equals(runs_of.assign(path=""))
    assert len(again.metrics) == len(results.metrics)
    before = {path: path.read_bytes() for path in paths}
    export(results.select(experiment="random_label"), out)
    assert {path: path.read_bytes() for path in paths} == before
    write_run(tmp_path / "other", "random_label", "none", 2, task_lines([0.75] * 4, 2))
    export(load(tmp_path / "other"), out)  # which replaces the same run alone
    again = load_exported(out).select(experiment="random_label")
    ends = again.metrics.groupby(["label", "seed"])["value"].last()
    assert ends.to_dict() == {("none", 1): 0.501, ("none", 2): 0.752} and len(again.runs) == 2


def test_a_thinned_curve_keeps_the_ends_of_a_phase():
    rows = pd.DataFrame({"label": "none", "seed": 1, "metric": "loss", "phase": 0, "step": range(250)})
    kept = thin(rows)["step"].tolist()
    assert (kept[:3], kept[-1], len(kept)) == ([0, 3, 7], 249, 64)


def test_a_seed_counts_once(root):
    """The same seed in two folders, and one run copied to another seed, as in modded-nanogpt 358."""
    folder = root / CELL / "small" / "fire"
    shutil.copytree(folder / "seed_1", folder / "seed_01")
    with pytest.raises(UserError, match="small fire: seeds 1, 1 are in two folders"):
        load(root)
    (folder / "seed_01").rename(folder / "seed_4")
    with pytest.raises(UserError, match="small fire: seeds 1, 4 have the same numbers"):
        load(root)


def test_settings_come_from_the_record_and_not_from_the_name_of_the_folder(root):
    changed = ["method.targets=[attention,head]", "data.folder=/somewhere", "optimizer_state=clear_changed"]
    told = {"overrides": changed, "identity": "f00d"}
    folder = write_run(root, "random_label", "fire-0123abcd", 1, task_lines([0.5] * 4, 0), **told)
    results = load(root, ["random_label"])
    known = {"method.targets": "attention,head", "optimizer_state": "clear_changed"}
    assert results.overrides == {"fire-0123abcd": known} and results.first["identity"] == "f00d"
    (folder / "meta.json").write_text(json.dumps({"method": "fire"}))
    assert "does not list its overrides" in load(root, ["random_label"]).problems[0]
    moved = folder.parents[1] / f"fire-{without_seed(read_config(folder))}"
    folder.parent.rename(moved)
    assert "another config than that of fire: move" in load(root, ["random_label"]).problems[0]
    for seed in (1, 2):
        config = write_run(root, "random_label", "none", seed, task_lines([0.5] * 4, seed)) / "config.yaml"
    config.write_text("epochs: 5\nseed: 2\n")
    with pytest.raises(UserError, match="none: its seeds differ in epochs, protocol"):
        load(root, ["random_label"])


def test_own_runs_do_not_hide_the_committed_ones(root, tmp_path, monkeypatch, capsys):
    write_run(root, "random_label", "none", 1, task_lines([0.5] * 4, 0))
    export(load(root), tmp_path / "results")
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    assert len(open_results("runs").runs) == 7
    write_run(Path("runs"), "random_label", "fire", 2, task_lines([0.5] * 4, 0))
    both = open_results("runs")
    assert len(both.select(experiment=CELL).runs) == 6
    assert both.select(experiment="random_label").runs["label"].tolist() == ["fire"]  # not the committed one
    assert CELL in capsys.readouterr().err
    assert open_results("runs", "paper").runs.empty and not capsys.readouterr().err
    with pytest.raises(UserError, match="elsewhere"):
        open_results("elsewhere")


def test_runs_on_other_data_do_not_replace_those_of_the_experiment(tmp_path):
    for label, data in (("none", "cifar10"), ("none-data=svhn", "svhn")):
        write_run(tmp_path, CELL, label, 1, warm_start_lines(0.5, len(data)), data=data)
    assert len(settings(results := load(tmp_path))) == 2
    assert [part.first["data"] for part in own_data(settings(results))] == ["cifar10"]
    assert [part.first["data"] for part in own_data(settings(results.select(data="svhn")))] == ["svhn"]
