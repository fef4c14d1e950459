"""Identities and metrics are those of the golden record, which `python tests/golden/record.py` writes."""

import csv
import json

import pytest
import record
from training_scripts import with_method

from harness.config import compose, domain_of
from harness.domains import find, methods_of

ROWS = {(row["experiment"], row["size"]): row for row in csv.DictReader(record.IDENTITIES.open())}
DEFAULTS = {"random_label": "small", "fig3_best": "medium", "fig4a_asterix": "paper", "fig4b_walk": "medium"}


def test_the_record_names_every_experiment_and_size():
    assert list(ROWS) == list(record.settings())


@pytest.mark.parametrize("setting", ROWS, ids="/".join)
def test_no_setting_of_fire_has_another_identity(setting):
    assert record.identity_of(*setting, "fire") == ROWS[setting]["fire"] != "refused"


@pytest.mark.parametrize("setting", DEFAULTS.items(), ids="/".join)
def test_no_method_has_another_identity(setting):
    domain = find(domain_of(setting[0]))
    composed = compose(domain, [f"experiment={setting[0]}", f"size={setting[1]}", "method=none"])
    for method in methods_of(domain):
        assert record.identity_in(domain, with_method(composed, method)) == ROWS[setting][method], method


@pytest.mark.slow
@pytest.mark.parametrize("setting", ROWS, ids="/".join)
def test_all_identities(setting):
    [row] = record.identities([setting])
    assert row == {key: value for key, value in ROWS[setting].items() if value}


@pytest.mark.parametrize("domain", record.SCRIPTS)
def test_metrics(domain, tmp_path):
    """Killed or not, with a shared first phase or not, a run writes the same bytes: those of the record, on its machine."""
    found = record.metrics(tmp_path, [domain])
    known = json.loads(record.METRICS.read_text()).get(record.machine())
    if known is None:
        pytest.skip(f"the record has no {record.machine()}")
    assert found == {key: value for key, value in known.items() if key.startswith(f"{domain} ")}
