"""The `fidelity` fixture fails above the tolerance and records what it compared; the page follows the record."""

import json
import re

import pandas as pd
import pytest
import torch
from torch import nn

from analysis import fidelity as fidelity_page
from language.model import Decoder, Shape
from rl.dqn.network import DQN
from rl.sac.network import Actor, Critics
from vision.models import build


def test_a_comparison_is_recorded_and_checked(fidelity, monkeypatch, tmp_path, request):
    monkeypatch.setenv("FIDELITY_RECORD", str(tmp_path / "lines.jsonl"))
    fidelity("method", "fire", "matrix after 10 iterations", 1e-8, 1e-7)
    with pytest.raises(AssertionError, match=r"differs by 0\.002, allowed 1e-07"):
        fidelity("method", "fire", "matrix after 5 iterations", 2e-3, 1e-7)
    with pytest.raises(AssertionError):
        fidelity("method", "fire", "NaN", float("nan"), 1.0)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    told = {"kind": "method", "row": "fire", "what": "matrix after 10 iterations", "difference": 1e-8}
    assert lines[0] == told | {"tolerance": 1e-7, "test": request.node.nodeid}
    assert [line["difference"] <= line["tolerance"] for line in lines] == [True, False, False]


def test_the_page_is_the_one_of_the_committed_record():
    record = pd.read_csv(fidelity_page.RECORD)
    assert fidelity_page.failed(record).empty
    assert len(fidelity_page.failed(record[:1].assign(difference=float("nan")))) == 1
    assert fidelity_page.PAGE.read_text() == fidelity_page.page(record)


def test_a_difference_above_its_tolerance_shows_and_is_in_the_exit_code(tmp_path, monkeypatch, capsys):
    record = pd.read_csv(fidelity_page.RECORD)
    row = record.index[record["what"] == "net: logits, eval mode"][0]
    record.loc[row, "difference"] = 0.35
    monkeypatch.setattr(fidelity_page, "ROOT", tmp_path)
    for name in ("RECORD", "PAGE"):
        monkeypatch.setattr(fidelity_page, name, tmp_path / name)
    record.to_csv(tmp_path / "RECORD", index=False)
    (tmp_path / "PAGE").write_text("<!-- table panels -->\n<!-- end -->\n")
    assert fidelity_page.main([]) == 1
    cells = rf"\| {record.loc[row, 'row']} +\| \*\*differs: 0.35\*\* +\|"
    assert re.search(cells, (tmp_path / "PAGE").read_text())
    assert "differs: 0.35" in capsys.readouterr().out


def test_a_renewed_record_has_the_largest_difference_of_each_quantity_and_keeps_the_others():
    record = pd.read_csv(fidelity_page.RECORD)
    line = record.iloc[0].to_dict()
    notes = [line | {"difference": each, "test": f"tests/x.py::test_x[{each}]"} for each in (0.1, 0.3, 0.2)]
    new = fidelity_page.renewed(record, pd.DataFrame(notes)).set_index(fidelity_page.QUANTITY)
    assert len(new) == len(record) and (new["difference"] == 0.3).sum() == 1
    renewed = new.loc[tuple(line[key] for key in fidelity_page.QUANTITY)]
    assert (renewed["difference"], renewed["test"]) == (0.3, "tests/x.py::test_x")


def test_the_page_and_every_deviation_name_tests_that_exist():
    known = set()
    for path in (fidelity_page.ROOT / "tests").rglob("test_*.py"):
        found = re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
        known |= {f"{path.parent.name}/{path.name}::{name}" for name in found}
    named = set(re.findall(r"`(\w+/test_\w+\.py::test_\w+)`", fidelity_page.PAGE.read_text()))
    assert named and named <= known
    defined = {name.partition("::")[2] for name in known}
    text = (fidelity_page.ROOT / "docs" / "DEVIATIONS.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\|(?! ---)(?!.*test \|$)", line)]
    assert len(rows) > 30
    for row in rows:
        named = set(re.findall(r"`(test_\w+)`", row))
        assert named and named <= defined, row


def test_nets_of_the_paper_are_float32_without_grouped_convolutions():
    sizes = {"resnet18": (10, 32), "vgg16": (200, 64), "vit_tiny": (100, 32)}
    with torch.device("meta"):
        nets = [build(name, classes=n, channels=3, image_size=size) for name, (n, size) in sizes.items()]
        nets += [Decoder(Shape()), DQN(18), Actor(51, 19), Critics(51, 19)]
    for net in nets:
        assert {p.dtype for p in net.parameters()} == {torch.float32}
        assert all(module.groups == 1 for module in net.modules() if isinstance(module, nn.Conv2d))
