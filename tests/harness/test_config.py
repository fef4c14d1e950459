"""Command lines and configs: types and ranges, the nearest key, identities, labels, trials and triggers."""

from contextlib import suppress
from dataclasses import fields
from itertools import combinations

import pytest
from omegaconf import OmegaConf
from training_scripts import compose_config, train_here

from fire_core.errors import UserError
from fire_core.methods import Method, available, create
from harness.config import CONF, content_of, domain_of, options, read_yaml, runs_of, settings_of
from harness.domains import find, modules
from harness.manual import manual
from harness.naming import LABEL_LENGTH, changes, identity, label
from harness.overrides import check_sweep
from harness.settings import keys
from harness.trial import part_of, seed_of
from harness.trigger import KINDS, RunTrigger, check_trigger

VISION = find("vision")


def vision(*overrides):
    """(config, settings that its numbers depend on, those of its phase 0) of a smoke run."""
    cfg = compose_config("vision", ["size=smoke", *overrides])
    return cfg, *identity(VISION, cfg, create(**cfg.method))


def test_every_experiment_has_two_sizes_methods_that_exist_and_a_sweep_if_it_says_so():
    for experiment in options("experiment"):
        assert {"smoke", "small"} <= set(content_of(experiment)["at"])
        if sweep := content_of(experiment).get("hydra"):
            assert len(runs_of([f"{key}={value}" for key, value in sweep["sweeper"]["params"].items()])) > 1


def test_a_chosen_file_takes_the_place_of_the_experiments_and_a_typed_value_of_both():
    cfg = compose_config("vision", ["model=vgg16", "model.depth=11", "data=cifar10"])
    assert (cfg.model.name, cfg.model.width, cfg.model.depth) == ("vgg16", None, 11)
    assert (cfg.data.name, cfg.data.image_size, cfg.data.train_per_class) == ("cifar10", 14, 500)
    for domain, name in {"language": "model.width", "dqn": "network.hidden", "sac": "actor.width"}.items():
        assert OmegaConf.select(compose_config(domain, ["size=paper", f"{name}=32"]), name) == 32


MISTAKES = [
    ("clip_norm=big", "clip_norm='big': give a number above 0"),
    ("learning_rate=nan", "learning_rate=nan: give a number above 0"),
    ("data.fit=crop", "data.fit='crop': choose one of pad, resize"),
    ("size=medium9", "size=medium9 does not exist; did you mean 'medium'?"),
    ("hydra.run.dir=out", "choose their root with run.root=FOLDER"),
    ("foo", "settings are written as key=value, as in learning_rate=1e-3"),
    ("method=fier", "method=fier does not exist; did you mean 'fire'?"),
    ("seed=range(1,4)", "requires --multirun"),
    ("experiment=fig4a_asterix", "belongs to dqn, this script trains vision"),
    ("batchsize=3", "did you mean 'batch_size'?"),
    ("method.coefficient=1", "'method.coefficient'. The chosen method has no such setting."),
    ("iterations=3", "did you mean 'method.iterations'?"),
    ("at.paper.protocol.share=0.2", "did you mean 'protocol.share'?"),
    ("trigger.steps=5", "trigger=boundary got an unexpected keyword argument 'steps'"),
    ("protocol=3", "does not fit the keys of this script: Merge error"),
    ("seed={a: 1}", "seed={'a': 1}: give a whole number"),
    ("clip_norm=${oc.env:NOTHING}", "cannot be resolved: KeyError raised while resolving interpolation"),
]  # fmt: skip


@pytest.mark.parametrize("override, answer", MISTAKES)
def test_a_mistake_is_one_line(override, answer):
    with pytest.raises(UserError) as caught:
        compose_config("vision", [override])
    assert answer in str(caught.value) and "\n" not in str(caught.value)


def test_every_value_of_conf_is_a_key_of_the_schema_and_every_key_has_a_meaning():
    hidden = ("experiment", "size", "method", "minutes")
    for domain in map(find, modules()):
        text = manual(domain, everything=True)
        assert len(manual(domain).splitlines()) <= 80 and "--help all" in manual(domain)
        assert all(f"  {name} [" in text for name in keys(domain) if name not in hidden)
        assert all(name in text for name in options("experiment") if domain_of(name) == domain.name)


@pytest.mark.parametrize("name", available())
def test_a_method_needs_no_file_and_the_experiment_tunes_it(name):
    """Its settings are the fields of its class with their defaults; conf/tuned.yaml says what else tunes them."""
    settings = settings_of(available()[name])
    plain = OmegaConf.to_container(OmegaConf.create({"method": settings}), resolve=True)["method"]
    assert plain.pop("name") == name and plain.pop("variant", "published") == "published"
    assert plain == {field.name: getattr(create(name), field.name) for field in fields(create(name))}
    elsewhere = read_yaml(CONF / "tuned.yaml").get(name, {})
    for setting in plain:
        for key in (f"{name}.{setting}", elsewhere.get(setting)):
            if key:
                tuned = OmegaConf.create({"method": settings, "tuned": {}})
                OmegaConf.update(tuned, f"tuned.{key}", 7)
                assert tuned.method[setting] == 7
    acts_at_boundaries, method = "tuned.first_phase" not in settings["first_phase"], available()[name]
    treats = method.treat is not Method.treat and not method.changes_optimizer
    treats = treats or method.changes_structure or method.optimizer_state is not None
    assert acts_at_boundaries == (treats or name == "none")


def test_a_setting_that_was_added_to_a_method_is_in_the_config_where_it_is_set():
    plain, *numbers = vision()
    assert plain.method.name == "fire" and not {"min_norm", "variance_factor"} & set(plain.method)
    _, *same = vision("method.min_norm=0")
    other, *others = vision("method.min_norm=1e-3")
    assert same == numbers != others and other.method.min_norm == create(**other.method).min_norm == 1e-3


def test_what_cannot_change_numbers_is_not_part_of_a_runs_identity():
    _, one, _ = vision()
    _, other, _ = vision("eval_batch_size=7", "threads=5", "run.root=x", "data.folder=y", "device=cpu")
    assert other == one != vision("batch_size=3")[1] and "run" not in one
    _, own, _ = vision("data=image_folder", "data.folder=mine")
    assert own["data"]["folder"] == "mine"


def test_runs_that_differ_in_what_acts_at_a_boundary_share_phase_0_but_for_a_trigger():
    _, _, trunk = vision()
    assert trunk is not None
    _, _, same = vision("method=none", "optimizer_state=keep", "mode_at_boundary=eval")
    assert same == trunk and trunk not in (vision("seed=2")[2], vision("batch_size=3")[2])
    for alone in (["trigger=every", "trigger.steps=5"], ["run.trunk=false"]):
        assert vision(*alone)[2] is None


def test_labels_are_readable_and_short():
    assert label("fire", ["method.iterations=20"]) == "fire-iterations=20"
    given = ["protocol.epochs=[20, 2]", "method.rule='a b/c'"]
    assert label("fire", given) == "fire-protocol.epochs=20,2-rule=_ab_c_"
    ten = [f"key_number_{i}={i}.5" for i in range(10)]
    assert label("fire", ten).startswith("fire-key_number_0=0.5-") and len(label("fire", ten)) <= LABEL_LENGTH
    assert label("fire", ten) != label("fire", [*ten[:-1], "key_number_9=0"])
    assert len(label("fire", ["x=" + "y" * 300])) <= LABEL_LENGTH
    typed = ["threads=3", "method=fire", "data=cifar10", "seed=2", "clip_norm=1", "hydra/launcher=ray"]
    assert changes(VISION, typed) == ["clip_norm=1", "data=cifar10"]  # threads change no number


def test_a_mistake_in_a_sweep_is_told_once_before_anything_starts():
    for domain, typed, told in (
        ("vision", ["method=none,fire", "clip_norm=big"], "clip_norm='big'"),
        ("vision", ["method=plasticity_injection"], "does not run in vision: it needs an encoder"),
        ("sac", ["midpoint=500"], "midpoint=500"),
        ("vision", ["experiment=label_noise,ablation_strength"], "ablation_strength sweeps settings"),
        ("vision", ["experiment=random_label", "compat=official"], "warmup_share=0 needs schedule=ours"),
        ("vision", ["experiment=permuted", "gradual=0.5"], "gradual=0.5 has no effect"),
        ("vision", ["protocol.replay=1"], "no setting 'replay': it has epochs, share, splits"),
    ):
        with pytest.raises(UserError) as caught:
            check_sweep(find(domain), ["size=smoke", "seed=1,2", *typed])
        assert str(caught.value).count(told) == 1 and "\n" not in str(caught.value)
    assert len(check_sweep(VISION, ["experiment=ablation_strength", "seed=1,2"])) == 10


@pytest.mark.parametrize("experiment", ["fig2a_cifar10_resnet18", "fig3_60k"])
def test_trials_share_the_trunk_of_their_seed_and_are_runs_of_their_own(experiment):
    domain, trial = domain_of(experiment), "trial.share=.2"
    lines = [[], [trial, "trial.repeat=1"], [trial, "trial.repeat=2"], [trial]]
    given = [f"experiment={experiment}", "size=smoke", "method=fire"]
    configs = [compose_config(domain, [*given, *typed]) for typed in lines]
    numbers, trunks = zip(*(identity(find(domain), cfg, create(**cfg.method)) for cfg in configs))
    assert trunks[0] is not None and all(trunk == trunks[0] for trunk in trunks)
    assert all(a != b for a, b in combinations(numbers, 2))
    assert "trial" not in numbers[0]  # older runs keep their folders
    plain, first, second, _ = configs
    assert [part_of(cfg, 50) for cfg in (plain, first)] == [50, 10] and part_of(first, 1) == 1
    assert seed_of(plain, 0) == seed_of(plain, 1) == seed_of(first, 0) == plain.seed
    assert len({seed_of(cfg, 1) for cfg in (plain, first, second)}) == 3


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
    more = ["trigger.share=0.95", "trigger.cooldown=1000", "protocol.epochs=[1,7]", "learning_rate=0.05"]
    train_here("vision", tmp_path, "trigger=gradient", *more)
    assert len(list(tmp_path.glob("*/smoke/*/seed_1/boundary_*.json"))) == 1


def test_methods_that_cannot_act_whenever_they_are_told_to_are_refused():
    can = set()
    for method in available():
        with suppress(UserError):
            check_trigger({"name": "every", "steps": 5}, create(method), ())
            can.add(method)
    during = "cbp l2_init muon parseval plasticity_injection redo snr adamo fire_muon hare_tortoise spectral"
    during = {*during.split(), "upgd", "weight_clipping", "cpr", "l2_er", "nap", "regrama", "swr"}
    assert during <= available().keys() and not can & during
    assert can >= {"none", "fire", "fire_exact", "full_reset", "shrink_perturb", "dash", "rescale", "cap"}
