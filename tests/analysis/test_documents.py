"""The documents say what the committed results say: their tables are the generated ones, and their sentences hold."""

import re
from itertools import product

import numpy as np
import pandas as pd
import pytest

from analysis import claims, names, plot, rendering, tables, trial_evidence
from analysis.figures import CAPTIONS, FIGURES, dial, forest, studies, timing
from analysis.runs import RESULTS, at_most, load_exported, settings
from analysis.tables import TABLES, Material, side


@pytest.fixture(scope="module")
def material():
    return Material(load_exported())


def prose(name):
    """The text of a document without its tables, on one line."""
    text = (tables.ROOT / name).read_text(encoding="utf-8")
    return " ".join(re.sub(r"<!-- (table|figure).*?<!-- end -->", "", text, flags=re.DOTALL).split())


def test_committed_tables_are_those_of_the_committed_results(material):
    for path, text in tables.texts(material).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: run make tables"


def test_the_documents_show_every_figure_that_is_committed_and_no_other(material):
    text = "".join((tables.ROOT / document).read_text() for document in tables.DOCUMENTS)
    committed = {path.stem for path in (RESULTS / "figures").glob("*.png")}
    waiting = {"dial"} if TABLES["dial"](material).empty else set()
    assert set(re.findall(r"results/figures/(\S+)\.png", text)) == committed
    assert {name.rpartition("-")[0] for name in committed} == set(FIGURES) - waiting


def test_the_cap_is_the_one_that_the_exploring_seeds_choose(material):
    for part in settings(load_exported(RESULTS / "dial")):
        fresh = part.select(seed=dial.FRESH)
        ((_, rows),) = dial.turned([part])  # on the exploring seeds; the smaller one of two that are equal
        best = rows[rows["side"] == "large"].set_index("label")["difference"].idxmax()
        assert {label for label in fresh.runs["label"] if part.methods[label] == "cap"} == {best}
    rows = TABLES["cap"](material).set_index("panel")
    verdicts = rows.groupby(rows["claim"].str.split(" > ").str[1])["verdict"].agg(dict)
    assert set(verdicts["none (continue)"].values()) == {"holds"}
    wanted = {"2a VGG-16": "contradicted", "3 from 60,000": "contradicted"}
    wanted |= dict.fromkeys(("2a ResNet-18", "2c ViT-Tiny", "random_label"), "holds")
    assert verdicts["FIRE"] == wanted
    assert "VGG-16 and in language, with half the scale, it loses to FIRE" in prose("docs/findings.md")
    gains = rows[rows["claim"].str.endswith("FIRE")]["gain [95 %]"].str.findall(r"\d\.(\d+)")
    numbers = [sorted(f"{float('.' + digits):.3f}"[1:] for digits in gain) for gain in gains]
    resnet, vgg, _, gpt, labels = (f"{mean} [{low}, {high}]" for low, mean, high in numbers)
    readme = prose("README.md")
    text = rf"by {re.escape(resnet)} on ResNet-18 and \.(\d+) \[\.(\d+), \.(\d+)\] on ViT-Tiny with new classes, at half"
    told = re.search(rf"{text} the scale, and by {re.escape(labels)} on random labels", readme).groups()
    assert all(abs(int(said) - int(found) / 10) < 0.6 for said, found in zip(told, gains["2c ViT-Tiny"]))
    assert f"On VGG-16 and GPT, at half the scale, it loses by {vgg} and {gpt}" in readme


def test_the_controls_explain_a_part_at_most(material):
    rows = TABLES["optimizer"](material).set_index(["panel", "control"])
    verdicts = rows.map(lambda cell: cell.rpartition(", ")[2])
    gained = verdicts[verdicts["FIRE > untreated"] == "holds"]
    assert set(gained["FIRE > control"]) == {"holds"} and len(rows) == 13, "no control explains the gain"
    part = gained.index[gained["control > untreated"] == "holds"]
    assert set(part) == {("2a ResNet-18", "rewarm"), ("random_label", "clear"), ("random_label", "rewarm")}
    assert {*verdicts.index[verdicts["control > untreated"] == "holds"]} == {*part, ("2a ViT-Tiny", "rewarm")}
    gain = rows.map(lambda cell: float(cell.split()[0]))
    share = gain.loc[part, "control > untreated"] / gain.loc[part, "FIRE > untreated"]
    assert share.round(2).to_dict() == dict(zip(part, (0.23, 0.23, 0.48))), "about a quarter, about half"
    assert "gives about a quarter of it" in prose("docs/findings.md")


def test_what_is_said_of_timing(material):
    studied = timing.studied(material.parts("mistiming*", "gradual*", *timing.BASES.values()))
    found = {own.first["experiment"]: rows.set_index(["method", "share"]) for own, _, rows in studied}
    gradual, mistimed = found["gradual_random_label"], found["mistiming_random_label"]
    alone = gradual["mean"]["none"]
    assert round(alone[0.5], 2) == 0.99 and alone[0.1] < alone[0.0]
    assert (gradual["difference_high"].xs(0.5, level="share").dropna() < 0).all(), "all three methods do harm"
    kept = mistimed["difference"].unstack()[0.5] / mistimed["difference"].unstack()[0.0]
    assert kept[["fire", "shrink_perturb"]].tolist() == pytest.approx([0.75, 0.5], abs=0.03)
    low = mistimed["difference_low"]
    assert low["full_reset", 0.5] < 0 < low["fire", 0.5] and (low.unstack()[-0.1].dropna() < 0).all()
    gradual, late = found["gradual_resnet18"], found["mistiming_resnet18"]
    assert set(gradual["n"]) == set(late["n"]) == {5}
    fire, low = late["difference"]["fire"], late["difference_low"]
    assert fire.round(2).isin([0.05, 0.06]).all() and (low["fire"] > 0).all() and low["full_reset", -0.1] < 0
    kept, slow = gradual["difference"]["fire"], gradual["difference_low"].unstack()[[0.25, 0.5]]
    assert (kept[[0.25, 0.5]] < kept[0.0] / 2).all() and (slow.loc["fire"] > 0).all(), "less than half"
    assert np.ptp(gradual["mean"]["none"]) < 0.015 and (slow.drop(index="fire").dropna() < 0).all(axis=None)


def test_what_is_said_of_the_ends_of_the_spectrum():
    turned = dial.turned(settings(load_exported(RESULTS / "dial")))
    resnet, vgg, vit, gpt, labels = (rows.set_index(["side", "w"]) for _, rows in turned)
    assert (vit.loc["large"].loc[1.5:, "difference_low"] <= 0).all(), "above the scale no gain is shown"
    assert (vit.loc["large", "difference"].diff()[:2.0].dropna() < 0).all(), "lower caps gain more"
    assert not vit.loc["large"].loc[4.0:, "difference"].any(), "no singular value lies above"
    raised = pd.concat([resnet, vgg, labels]).loc["small"]
    assert (raised["difference_low"] < 0).all(), "raising shows no gain"
    assert labels.loc["large", "difference"].idxmax() == 4.0
    for panel, (_, rows) in zip((resnet, vgg), turned):  # "the order is that of ResNet-18"
        large, both, level = panel.loc["large"], panel.loc["both"], rows.set_index("label")
        assert large["difference"].idxmax() == 0.5 and (large["difference_low"][[4.0, 8.0, 16.0]] <= 0).all()
        assert level["difference_low"]["singular_clip"] < 0
        cap = large.loc[both.index]
        assert (both["difference_low"] < cap["difference_high"]).all(), "about as much as the cap"
        assert (cap["difference_low"] < both["difference_high"]).all()
    as_high = level.loc[["fire_exact", "rescale", "cap-high=0.5"]]  # on VGG-16
    assert as_high["difference_low"].max() < level["difference"]["fire"] < as_high["difference_high"].min()
    caps, level = gpt.loc["large", "difference"], turned[3][1].set_index("label")["difference"]
    assert np.ptp(caps[:2.0]) < 0.005 and (caps[2.0:].diff().dropna() < 0).all()
    assert caps.max() < level["rescale"] < level["fire"] < 2 * level["rescale"] and level["fire_exact"] < 0
    assert (gpt.loc["both", "difference_low"] < caps[1.5:]).all()
    assert (gpt.loc["small", "difference_high"][:1.5] < 0).all(), "raising the small ones does harm"
    exact, cap = resnet.loc[("all", 0.5)], resnet.loc[("large", 0.5)]
    assert cap["difference_low"] < exact["difference"] < cap["difference_high"], "ends about as high"


def test_the_committed_figures_show_the_committed_runs():
    for path in (RESULTS / "figures").glob("*.md"):
        name, _, size = path.stem.rpartition("-")
        results = load_exported(RESULTS / "dial" if name == "dial" else RESULTS)
        parts = settings(at_most(results.matching(FIGURES[name].experiments), size))
        runs = plot.provenance(pd.concat([part.runs for part in parts if len(part.metrics)]))
        assert path.read_text() == f"{CAPTIONS[name]}\n\nRuns: {runs}.\n", f"{path.name}: make tables"


def test_reproduced_is_short_and_findings_leave_numbers_to_tables():
    assert len((tables.ROOT / "REPRODUCED.md").read_text().splitlines()) <= 250
    assert not re.findall(r"\d\.\d", re.sub(r"\(.*?\)", "", prose("docs/findings.md")))


def test_the_counts_of_the_readme(material):
    decided = claims.largest(claims.of_paper(material.verdicts))
    found, text = claims.counts(decided), prose("README.md")
    held = decided.query("verdict == 'holds'")
    words = ("holds", "contradicted", "not decided", "open", "not planned", "premise not met")
    holds, contradicted, undecided, waiting, unplanned, out = (found[word] for word in words)
    assert f"**{holds} hold, {contradicted} are contradicted, and {undecided} are not decided**" in text
    against = decided.query("verdict == 'contradicted'")
    resets, losses = against["better"].eq("full_reset").sum(), against["worse"].isin(["dash", "none"]).sum()
    two = f"FIRE ends ahead in {held['better'].eq('fire').sum()} of the {holds}. Two of the {contradicted} contradicted"
    assert f"{two} say that a full reset beats FIRE; here FIRE wins. In the others, FIRE loses to" in text
    assert len(against) == resets + losses == 2 + 2
    said = f"{waiting} are open, because not all of their seeds have run, and {unplanned} has none planned"
    assert said in text and f"{out} do not count" in text and "DASH, and to `none` (BeamRider)" in text
    assert f"{found['all'] + out} of the paper's comparisons were run" in text


RESNET, VGG, *LANGUAGE = studies.GAINS
VIT, *VITS = (f"fig2{panel}_cifar100_vit_tiny" for panel in "abc")
CONTINUAL, HUMANOID = "fig2b_tiny_imagenet_vgg16", ["fig4b_walk", "fig4b_balance_simple", "fig4b_run"]
GAME = "fig4a_asterix"
ENDS = [  # of FIRE in panels against rivals, by the verdict, as the findings and the README say
    ("beats", [RESNET, VGG, "fig2b_cifar10_resnet18", *LANGUAGE], ["none"]),
    ("not decided", [VIT, *VITS, *HUMANOID], ["none"]), ("loses to", ["fig4a_beam_rider"], ["none"]),
    ("loses to", [VIT], ["shrink_perturb", "full_reset"]), ("loses to", VITS, ["full_reset"]),
    ("beats", [CONTINUAL], ["shrink_perturb"]), ("not decided", [CONTINUAL], ["none", "full_reset"]),
    ("beats", studies.GAINS, ["rescale"]), ("loses to", [RESNET], ["dash", "muon", "redo"]),
    ("beats", [VGG], ["dash", "muon", "redo"]), ("beats", [RESNET, VGG, "fig3_60k"], forest.LATER),
    ("beats", [GAME], ["none", "plasticity_injection"]), ("not decided", [GAME], ["full_reset", "shrink_perturb"]),
    ("loses to", VITS[1:], ["spectral"]), ("not decided", VITS[1:], {*forest.LATER} - {"spectral"}),
]  # fmt: skip


def test_where_fire_ends_in_the_panels(material):
    rows = claims.of_fire(material.planned).set_index(["experiment", "worse"])
    for end, panels, rivals in ENDS:
        assert {side(rows.loc[pair]) for pair in product(panels, rivals)} == {end}
    waiting = {*material.planned.query("verdict == 'open'")["experiment"]}
    assert waiting == {"fig4a_beam_rider"}  # "it is not complete"


def test_what_the_readme_says_of_tasks(material):
    decided = material.planned.query("worse != 'none' and verdict != 'open'")
    tried = claims.of_fire(decided).groupby("experiment")["worse"].agg(set)
    controls = {"fire_exact", "rescale"}
    assert [len(tried[each] - controls) for each in ("fig2a_tiny_imagenet_vgg16", "fig3_60k")] == [16, 13]
    assert tried["fig2b_cifar10_resnet18"] == {"shrink_perturb", "full_reset"}
    resnet = material.gaps("fire", "fig2a_cifar10_resnet18").set_index("label")["difference"]
    assert resnet[["dash", "muon", "redo"]].between(0.015, 0.035).all()  # "by .02 to .03"
    shown = material.gaps("none", "fig4a_asterix", "fig4a_beam_rider", "fig4a_breakout", "random_label")
    words = shown.set_index(["experiment", "label"])["word"]
    games = ("asterix", "beam_rider", "breakout")
    assert [words[f"fig4a_{name}", "fire"] for name in games] == ["better", "worse", "worse"]
    assert words["random_label", "fire"] == "better"
    asterix = material.gaps("fire", "fig4a_asterix").set_index("label")["word"]
    assert asterix[["rescale", "full_reset"]].tolist() == ["", ""]  # "`rescale` ends as high as FIRE"


def test_what_is_said_of_the_gpu_and_of_the_time_of_a_call():
    rows = pd.read_csv(RESULTS / "gpu_warm_start_interrupted.csv").query("epoch == 95").set_index("method")
    page = prose("docs/how-to/run_a_campaign.md")
    said = "After 95 of 100 epochs, the test accuracy was .{none:.0f} for `none` and .{fire:.0f} for FIRE"
    assert said.format(**(1000 * rows["test_accuracy"])) in page
    costs = pd.read_csv(RESULTS / "method_costs.csv").query("model == 'resnet18'").set_index("method")
    ours, dash = costs.loc[["fire", "dash"], "boundary_seconds"]
    said = f"On a ResNet-18, a call of FIRE takes {ours:.0f} s on one CPU core and one of DASH {dash:.0f} s (on 512 images)"
    idle = (step := costs["step_seconds"]).drop(["cbp", "l2_init", "muon", "parseval", "redo", "snr"])
    text = f"step took {step['muon']:.1f} s with Muon, and {idle.min():.1f} to {idle.max():.1f} s with methods that act"
    assert said in prose("README.md") and text in prose("README.md")


def test_what_findings_say_of_the_parts_of_the_gain(material):
    rows = material.gaps("none", *studies.GAINS).set_index(["experiment", "label"])
    gains = rows["difference"] * rows["higher_is_better"].map({True: 1, False: -1})
    most = [gains[name, "rescale"] > gains[name, "fire"] / 2 for name in studies.GAINS]
    assert sum(most) == 3 and "most of the gain in three of five panels" in prose("docs/findings.md")
    assert all(rows.loc[(name, "fire_exact"), "word"] == "worse" for name in studies.GAINS[2:])


def test_what_findings_say_of_costs(material):
    table = TABLES["costs"](material).set_index(["panel", "method"])
    after = table["right after"].str.split().str[0].astype(float)
    before = table["before"].str.split().str[0].astype(float)
    assert after["2a ResNet-18", "FIRE"] == pytest.approx(0.1, abs=0.005)  # chance among ten classes
    assert after["4b H1 walk", "FIRE"] < before["4b H1 walk", "FIRE"] / 2
    assert after["2a ViT-Tiny", "FIRE"] > 0.85 * before["2a ViT-Tiny", "FIRE"]
    assert after["3 from 60,000", "FIRE"] < before["3 from 60,000", "FIRE"]


def test_what_is_said_of_batch_norm():
    """The share of what lay above chance before the boundary, with new statistics; `none` is where the network was."""
    for experiment, both in studies.renewed().items():
        old, new = ({name: np.mean([*each.values()]) for name, each in values.items()} for values in both)
        chance = 0.1 if "resnet18" in experiment else 0.05
        chance = 0.02 if experiment == "fig2a_tiny_imagenet_vgg16" else chance
        share = {name: (value - chance) / (old["none"] - chance) for name, value in new.items()}
        lost = max(abs(share[name]) for name in ("full_reset", "random_orthogonal"))
        assert share["rescale"] > 0.95 and lost < 0.15
        if not experiment.startswith("fig2c"):
            assert all(v < 1.25 * chance for name, v in old.items() if name not in ("none", "singular_clip"))
            turned = ("fire", "fire_exact", "keep_norm")
            assert all(0 < share[name] < 0.5 for name in turned) and share["dash"] < 0.25
            assert share["interpolate"] > 0.75 and min(share["cap"], share["singular_clip"]) > share["fire"]
            assert 0.2 < share["shrink_perturb"] < (0.9 if chance == 0.02 else 0.7)


def test_what_is_said_of_random_labels_and_of_other_studies(material):
    table = TABLES["random_labels"](material)
    above = table[table["minus FIRE [95 %]"].str.contains(r"\[\+")]["method"].tolist()
    assert above[:3] == ["Muon", "SNR", "ReDo"] and "eleven methods above FIRE" in prose("docs/findings.md")
    assert len({*above} & {names.look(each).name for each in forest.LATER}) == 6 and len(above) == 11
    layered = material.gaps("fire", "random_label").set_index("label").loc["none-model.norm=layer"]
    interval = rendering.difference_text(layered).partition(" ")[2]
    assert f"{interval} on five seeds" in prose("docs/findings.md")
    assert TABLES["scaling"](material)["FIRE minus full reset"].str.startswith("+").all()  # "does not turn"
    resets = TABLES["boundaries"](material)["full reset"]
    assert not resets.str.contains(r"\[\+0\.\d*[1-9]").any()  # "a full reset never beats none"


def cells_of(page, head):
    """The other cells of the row of a table that begins with `head`."""
    return [cell.strip() for cell in re.search(rf"^\| {head}.*?\|(.*)\|$", page, re.MULTILINE)[1].split("|")]


def test_tables_of_the_theory_are_those_of_the_measurements_that_nothing_repeats():
    page = (tables.ROOT / "docs/studies.md").read_text(encoding="utf-8")
    rows = pd.read_csv(RESULTS / "theory.csv").astype({"theorem": str, "holds": str})
    for theorem, layers in rows[rows["theorem"].ne("1") | rows["method"].ne("none")].groupby("theorem"):
        known = layers.dropna(subset="bound")
        assert known["holds"].eq("True").all()
        ratio = (known["bound"] / known["measured"]).median()
        shown = [f"{len(known)} of {len(layers)}", str(len(known)), f"{known['measured'].median():.3g}"]
        assert cells_of(page, f"{theorem}: ") == [*shown, f"{known['bound'].median():.3g}", f"{ratio:.2g}"]
    layers = rows[rows["theorem"] == "3"]
    layers = layers.assign(matrices=1, below_1=layers["dfi"] < 1, below_1_scaled=layers["dfi_scaled"] < 1)
    both = pd.concat([layers, pd.read_csv(RESULTS / "theory_premise.csv")]).groupby(["network", "method"])
    sums = both[["below_1", "below_1_scaled", "matrices"]].sum()
    for network, methods in sums.div(sums.pop("matrices"), axis=0).groupby("network"):
        shares = methods.xs(network).loc[["none", "fire", "fire_exact"]].to_numpy().ravel()
        assert cells_of(page, network) == [f"{share:.0%}" for share in shares]


def test_what_is_said_of_the_fresh_trials():
    found = trial_evidence.fresh(load_exported(RESULTS / "trial"))
    said, page = trial_evidence.verdict(found), prose("docs/how-to/try_before_you_treat.md")
    gain = re.search(r"none minus trial 0(\.\d\d) \[0(\.\d\d), 0(\.\d\d)\]", said)
    assert "does not hold up" in said and f"by {gain[1]} [{gain[2]}, {gain[3]}]" in page
    for name, told in (("leader", "for 19 of 25 seeds"), ("cautious", "named a treatment, 13 times")):
        named = found[found[name] != "none"]
        assert (named[f"loss of the {name}"] < named["loss of none"]).all() and told in page
        assert str(len(named)) in told and len(found) == 25
    silent = found[found["leader"] == "none"]
    assert len(silent) == 6 and (silent["loss of none"] == 1).all()
    assert (silent["experiment"] == "random_label").sum() == 5
    close = found[found["experiment"].isin(["fig3_60k", "fig2a_tiny_imagenet_vgg16"])]
    close = close[close["leader"] == "shrink_perturb"]
    assert len(close) == 6 and (close["loss of fire"] < close["loss of the leader"]).all()
    assert "a treatment in 19 of 25 trials, and each of them ended ahead" in prose("README.md")
