"""Sentences, tables and figure of the boundaries beside the paper's, from runs whose numbers are known."""

import pytest
from synthetic_runs import write_run

from analysis import estimates, other_boundaries
from analysis.rendering import render
from analysis.runs import load


@pytest.fixture
def root(tmp_path):
    """Replay: FIRE gains 0.2 where a tenth stays and nothing else. Language: FIRE loses 0.5. Variants: 0.3 against 0.1."""
    for seed in (1, 2, 3):
        for share in (0.1, 1.0):
            for method, gain in (("none", 0.0), ("fire", 0.2 if share < 1 else 0.0)):
                accuracy = 0.5 + gain + 0.001 * seed * (share if method == "none" else 1)
                last = {"test_accuracy": accuracy, "old_accuracy": accuracy - 0.1, "new_accuracy": 0.9}
                lines = [{"phase": 0, "step": 1, "test_accuracy": 0.1}, {"phase": 1, "step": 2, **last}]
                label = f"{method}-protocol.replay={share}"
                write_run(tmp_path, other_boundaries.REPLAY, label, seed, lines, protocol="class_incremental")
        for method, loss in (("none", 4.0), ("fire", 4.5 + 0.001 * seed)):
            ends = {"val_loss_mix": loss, "val_loss_a": 5.0, "val_loss_b": loss}
            after = {key: value + 1 for key, value in ends.items()}
            lines = [{"phase": 1, "step": 1, **after}, {"phase": 1, "step": 2, **ends}]
            write_run(tmp_path, "language_domain", method, seed, lines, protocol="null")
        for net, share in (("squared_relu", 0.3), ("swiglu", 0.1)):
            lines = [
                {
                    "phase": phase,
                    "step": step,
                    "val_loss_mix": 4.0,
                    "dormant_share": share * step / 4 + seed / 1000,
                }
                for phase, step in ((0, 1), (0, 2), (1, 3), (1, 4))
            ]
            label = f"none-model.activation={net}"
            write_run(tmp_path, other_boundaries.VARIANTS, label, seed, lines, protocol="null")
    return tmp_path


def test_sentences_and_tables_say_what_the_runs_say(root):
    frame = estimates.frame(load(root))
    text = render("other_boundaries_in_short", pages="pages", **other_boundaries.told(frame))
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    shares = {row[1]: row[2] for row in cells if row[0] == "" and len(row) > 3}  # of FIRE, the first column
    assert shares["10%"] == "+0.202 [+0.200, +0.204]" and shares["100%"].startswith("+0.000")
    assert shares["new domain alone"] == "+0.502 [+0.500, +0.504]"
    assert "squared ReLU 0.302 [0.300, 0.304], SwiGLU 0.102 [0.100, 0.104]" in text
    page = other_boundaries.pages(frame)["other_boundaries"]
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    assert ["10%", "none (continue)", "0.5002 [0.5000, 0.5004]"] in [row[1:4] for row in rows]
    assert "4.5020 [4.4995, 4.5045] (5.50)" in page and "windows of 512 tokens" in page
    assert not any(other_boundaries.told(frame[:0]).values()) and other_boundaries.pages(frame[:0]) == {}


def test_the_figure_has_a_curve_for_each_activation(root):
    results = load(root)
    figure = other_boundaries.draw([results.select(experiment=other_boundaries.VARIANTS)])
    curves = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    assert curves["squared ReLU"].tolist() == pytest.approx([0.077, 0.152, 0.227, 0.302])
    assert curves["SwiGLU"].tolist() == pytest.approx([0.027, 0.052, 0.077, 0.102])
