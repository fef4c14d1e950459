"""Numbers of the boundaries beside the paper's, from runs whose numbers are known."""

import pytest
from synthetic_runs import write_run

from analysis import estimates, further_questions
from analysis.rendering import render
from analysis.runs import load


@pytest.fixture
def root(tmp_path):
    """Replay: FIRE gains 0.2 where a tenth stays and nothing else. Language: FIRE loses 0.5. Variants: 0.3 against 0.1."""
    for seed in (1, 2, 3):
        for share in (0.1, 1.0):
            for method, gain in (("none", 0.0), ("fire", 0.2 if share < 1 else 0.0)):
                accuracy = 0.5 + gain + 0.001 * seed * (share if method == "none" else 1)
                lines = [{"phase": 0, "step": 1, "test_accuracy": 0.1}]
                lines.append({"phase": 1, "step": 2, "test_accuracy": accuracy})
                label = f"{method}-protocol.replay={share}"
                write_run(
                    tmp_path, further_questions.REPLAY, label, seed, lines, protocol="class_incremental"
                )
        for method, loss in (("none", 4.0), ("fire", 4.5 + 0.001 * seed)):
            lines = [{"phase": 1, "step": 1, "val_loss_mix": loss}]
            write_run(tmp_path, "language_domain", method, seed, lines, protocol="null")
        for net, share in (("squared_relu", 0.3), ("swiglu", 0.1)):
            lines = [{"phase": 1, "step": 1, "val_loss_mix": 4.0, "dormant_share": share + seed / 1000}]
            label = f"none-model.activation={net}"
            write_run(tmp_path, further_questions.DECODERS, label, seed, lines, protocol="null")
    return tmp_path


def test_sentences_say_what_the_runs_say(root):
    results = load(root)
    frame = estimates.frame(results)
    told = further_questions.told(results, frame)
    text = render("other_boundaries", pages="pages", **told)
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    shares = {row[1]: row[2] for row in cells if row[0] == "" and len(row) > 3}  # of FIRE, the first column
    assert shares["10%"] == "+0.202 [+0.200, +0.204]" and shares["100%"].startswith("+0.000")
    assert shares["[new domain alone](pages/language_domain.md)"] == "+0.502 [+0.500, +0.504]"
    assert "squared ReLU 0.302 [0.300, 0.304], SwiGLU 0.102 [0.100, 0.104]" in text
    empty = further_questions.told(results.select(experiment="none"), frame[:0])
    parts = ("settings", "muon", "vit", "old_data", "second_phases", "decoders")
    assert not any(empty[name] for name in parts)
