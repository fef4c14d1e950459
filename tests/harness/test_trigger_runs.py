"""`trigger=`: a run acts when its trigger fires, says why, and resumes to the same bytes; not every method can."""

from contextlib import suppress

from omegaconf import OmegaConf
from training_scripts import Script, compose_config

from fire_core.errors import UserError
from fire_core.methods import available, create
from harness.config import CONF, options
from harness.trigger import KINDS, RunTrigger, check_trigger


def test_every_kind_of_trigger_has_its_file_and_its_settings_make_it():
    assert set(options("trigger")) == set(KINDS)
    assert "trigger" not in compose_config("vision", ["size=smoke"])
    for name in set(KINDS) - {"boundary"}:
        settings = compose_config("vision", ["size=smoke", f"trigger={name}"]).trigger
        assert set(settings) == set(OmegaConf.load(CONF / "trigger" / f"{name}.yaml"))
        RunTrigger(settings)


def test_a_metric_may_be_recorded_rarely():
    settings = {"metric": "loss", "patience": 1, "mode": "min", "min_change": 0, "cooldown": 5}
    trigger = RunTrigger({"name": "plateau", **settings})
    for step in range(300):
        trigger.look(step, {"other": 0.0} | ({"loss": 1.0} if step in (150, 299) else {}))
    assert trigger.cause == "plateau: loss=1 at step 299"


def test_an_act_waits_for_its_cooldown(tmp_path):
    more = ["trigger=gradient", "trigger.share=0.95", "trigger.cooldown=1000", "experiment=random_label"]
    Script("vision/train.py").train(tmp_path, *more)
    assert len(list(tmp_path.glob("*/smoke/*/seed_1/boundary_*.json"))) == 1


def test_methods_that_cannot_act_whenever_they_are_told_to_are_refused():
    can = set()
    for method in available():
        with suppress(UserError):
            check_trigger({"name": "every", "steps": 5}, create(method), ())
            can.add(method)
    during = (
        "cbp l2_init muon parseval plasticity_injection redo snr adamo fire_muon hare_tortoise spectral upgd "
    )
    during = {*during.split(), "weight_clipping", "cpr", "l2_er", "nap", "regrama", "swr"}
    assert during <= available().keys() and not can & during
    assert can >= {"none", "fire", "fire_exact", "full_reset", "shrink_perturb", "dash", "rescale", "cap"}
