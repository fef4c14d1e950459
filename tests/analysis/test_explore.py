"""The page to explore: it holds what was measured, needs nothing from outside, and runs no text that a run brought."""

import json
import re
from pathlib import Path

import pytest
from synthetic_runs import CELL, warm_start_lines, write_runs

from analysis import __main__ as command
from analysis import estimates, explore, measures, names
from analysis.rendering import difference_text, p_text
from analysis.runs import Results, load, settings

LEVELS = {"none": 0.7, "fire": 0.8, "full_reset": 0.82, "brand_new": 0.72}
HOSTILE = "x</script><script>document.title='taken'</script><img src=y onerror=\"document.title='taken'\">"


@pytest.fixture
def fire(tmp_path: Path) -> Results:
    """One method with two seeds."""
    write_runs(tmp_path, CELL, {"fire": 0.8})
    return load(tmp_path)


def test_numbers_are_those_of_the_runs_and_of_the_frame_of_estimates(results: Results) -> None:
    told, looks, frame = explore.page_data(results), names.looks(results), estimates.frame(results)
    assert [method["method"] for method in told["methods"]] == [look.name for look in looks.values()]
    labels, frame, compared = list(looks), estimates.sides(frame), 0
    parts = {part.first["experiment"]: part for part in settings(results)}
    for panel in told["settings"]:
        part = parts.pop(panel["experiment"])
        commits = part.finished.set_index(["label", "seed"])["commit"]
        values = {each["key"]: each["values"] for each in panel["measures"]}
        for measure in measures.of(part):
            shown = {}
            for (place, seed, commit, _), value in zip(panel["runs"], values.get(measure.key, [])):
                assert commit == commits[labels[place], seed]
                shown.setdefault(labels[place], {})[seed] = pytest.approx(value, rel=1e-5)
            assert measures.values(part.metrics, measure) == shown
        for measure in panel["measures"]:
            rows = frame[(frame["experiment"] == panel["experiment"]) & (frame["metric"] == measure["key"])]
            for place, *numbers, _ in measure["ends"]:
                row = rows[rows["label"] == labels[place]].iloc[0]
                assert numbers == pytest.approx(row[["mean", "low", "high", "n"]].tolist(), rel=1e-5)
            for place, reference, *told_text in measure["gaps"]:
                keep = (rows["label"] == labels[place]) & (rows["reference"] == reference)
                ((_, row),) = rows[keep].iterrows()
                assert told_text == [difference_text(row), row["word"], row["pairs"], p_text(row["p"])]
                compared += 1
    assert not parts
    assert compared == (frame["reference"].ne("") & (frame["kind"] == "result")).sum() > 10


def test_curves_pass_through_the_logged_values(results: Results) -> None:
    told = {panel["experiment"]: panel for panel in explore.page_data(results)["settings"]}
    (curve,) = [each for each in told[CELL]["curves"].values() if each]
    assert curve["unit"] == "epoch" and curve["boundaries"] == [10]
    place = next(i for i, run in enumerate(told[CELL]["runs"]) if run[:2] == [0, 2])  # FIRE, seed 2
    (_, grid, values) = next(line for line in curve["seeds"] if line[0] == place)
    logged = [line for line in warm_start_lines(0.802, 2) if line["phase"] or line["epoch"] >= 8]
    expected = {10 * line["phase"] + line["epoch"]: line["test_accuracy"] for line in logged}
    assert dict(zip(curve["grids"][grid], values, strict=True)) == pytest.approx(expected, rel=1e-5)
    low, high = curve["limits"]
    assert 0.6 < low < 0.7 < 0.823 < high < 0.9  # the first phase ends below
    (tasks,) = [each for each in told["random_label"]["curves"].values() if each]
    assert tasks["grids"] == [list(range(1, 21))]
    none = list(names.looks(results)).index("none")
    means, lows, highs = next(band[2:] for band in tasks["bands"] if band[0] == none)
    assert means[-1] == pytest.approx(0.9 - 0.04 * 19 + 0.002)
    half = 4.302653 * 0.001 / 3**0.5  # the 95 % interval of three seeds that are .001 apart
    assert [lows[-1], highs[-1]] == pytest.approx([means[-1] - half, means[-1] + half], abs=1e-6)


def test_a_panel_opens_with_the_methods_of_interest(tmp_path: Path) -> None:
    write_runs(tmp_path, CELL, LEVELS | {"shrink_perturb": 0.5, "muon": 0.9, "fire-iterations=5": 0.95})
    told = explore.page_data(load(tmp_path))
    opened = [told["methods"][place]["method"] for place in told["settings"][0]["open"]]
    assert sorted(opened) == ["FIRE", "full reset", "none (continue)", "shrink & perturb"]
    assert [method["method"] for method in told["methods"] if method["variant"]] == ["FIRE [iterations=5]"]


def test_only_returns_have_the_level_of_random_actions(results: Results) -> None:
    told = explore.page_data(results)["settings"]
    levels = {each["experiment"]: {measure["level"] for measure in each["measures"]} for each in told}
    beside = {name: {None} for name in (CELL, "random_label", "fig3_best")}
    assert levels == beside | {"fig4a_asterix": {6, None}}  # the mean of 3, 6 and 9


def test_the_page_is_one_file(root: Path) -> None:
    pytest.importorskip("vl_convert")
    assert command.main(["explore", "--root", str(root)]) == 0
    page = root / "explore.html"
    html = re.sub(r"<script>.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    loaded = re.findall(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]+)|url\(([^)]*)\)|@import""", html)
    assert loaded == [("data:,", "")] and "default-src 'none'" in html and page.stat().st_size < 2e6


def test_a_run_cannot_leave_its_script_element(fire: Results) -> None:
    pytest.importorskip("vl_convert")
    texts = {"experiment", "figure", "panel", "data", "method", "label", "commit", "model"}
    for frame in fire.frames:
        frame[[*texts.intersection(frame)]] = HOSTILE
    html = explore.page(fire)
    assert HOSTILE not in html and "</script><script>document" not in html and "<img src=y" not in html
    assert html.count("<script") == html.count("</script>") == 3
    inside = html.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    assert HOSTILE in json.loads(inside)["settings"][0]["experiment"]


def test_values_that_are_no_numbers_are_left_out(fire: Results) -> None:
    rows = fire.metrics.index[fire.metrics["metric"] == "test_accuracy"]
    fire.metrics.loc[rows[13:15], "value"] = float("nan"), float("inf")
    text = json.dumps(explore.page_data(fire))
    assert "NaN" not in text and "Infinity" not in text
    (curve,) = json.loads(text)["settings"][0]["curves"].values()
    assert sorted(map(len, curve["grids"])) == [11, 13]  # two values of one run are missing


@pytest.mark.slow
def test_a_click_changes_the_drawing_and_the_table(tmp_path: Path) -> None:
    selenium = pytest.importorskip("selenium.webdriver")
    waiting = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
    options = selenium.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        driver = selenium.Chrome(options=options)
    except Exception as error:  # selenium has many kinds for "there is no browser"
        pytest.skip(f"no Chromium with its driver: {str(error).splitlines()[0]}")
    write_runs(tmp_path, CELL, LEVELS, (1, 2, 3))
    assert command.main(["explore", "--root", str(tmp_path)]) == 0

    def wait_for(script: str) -> None:
        waiting(driver, 10).until(lambda driver: driver.execute_script(f"return {script}"))

    with driver:
        driver.get((tmp_path / "explore.html").as_uri())
        wait_for("document.body.dataset.ready")
        marks = "document.querySelectorAll('#ends .mark-symbol path').length"
        wait_for(f"{marks} === 4")
        driver.find_element("css selector", "#methods label:nth-child(2)").click()
        wait_for(f"{marks} === 3")
        shown = [button.text for button in driver.find_elements("css selector", "#body button")]
        assert shown == ["FIRE", "full reset", "brand new"]
        driver.find_element("xpath", "//option[text()='single seeds']").click()
        wait_for(f"{marks} === 9")
        driver.find_element("xpath", "//button[text()='all']").click()
        wait_for(f"{marks} === 12")
        assert driver.get_log("browser") == []
