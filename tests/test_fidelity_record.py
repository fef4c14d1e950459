"""The `fidelity` fixture fails above the tolerance and records what it compared; the page follows the record."""

import json
import re

import pandas as pd
import pytest

from analysis import fidelity as fidelity_page


def test_a_comparison_is_recorded_and_checked(fidelity, monkeypatch, tmp_path, request):
    monkeypatch.setenv("FIDELITY_RECORD", str(tmp_path / "lines.jsonl"))
    fidelity("method", "fire", "matrix after 10 iterations", 1e-8, 1e-7)
    with pytest.raises(AssertionError, match=r"differs by 0\.002, allowed 1e-07"):
        fidelity("method", "fire", "matrix after 5 iterations", 2e-3, 1e-7)
    with pytest.raises(AssertionError):
        fidelity("method", "fire", "NaN", float("nan"), 1.0)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "kind": "method",
        "row": "fire",
        "what": "matrix after 10 iterations",
        "difference": 1e-8,
        "tolerance": 1e-7,
        "test": request.node.nodeid,
    }
    assert [line["difference"] <= line["tolerance"] for line in lines] == [True, False, False]


def test_the_page_is_the_one_of_the_committed_record():
    record = pd.read_csv(fidelity_page.RECORD)
    assert fidelity_page.failed(record).empty
    assert fidelity_page.PAGE.read_text() == fidelity_page.page(record)


def test_a_difference_above_its_tolerance_shows_on_the_page_and_in_the_exit_code(
    tmp_path, monkeypatch, capsys
):
    record = pd.read_csv(fidelity_page.RECORD)
    row = record.index[record["what"] == "net: logits, eval mode"][0]
    record.loc[row, "difference"] = 0.35
    monkeypatch.setattr(fidelity_page, "ROOT", tmp_path)
    for name in ("RECORD", "PAGE"):
        monkeypatch.setattr(fidelity_page, name, tmp_path / name)
    record.to_csv(tmp_path / "RECORD", index=False)
    assert fidelity_page.main([]) == 1
    assert f"| {record.loc[row, 'row']} | **differs: 0.35** |" in (tmp_path / "PAGE").read_text()
    assert "differs: 0.35" in capsys.readouterr().out


def test_deviations_name_tests_that_exist():
    tests = fidelity_page.ROOT / "tests"
    defined = {
        name for path in tests.glob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", (fidelity_page.ROOT / "DEVIATIONS.md").read_text()))
    assert named and named <= defined
