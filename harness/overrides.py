"""Checks of command lines against the keys of a script, before anything is composed or starts."""

from dataclasses import fields

from omegaconf import DictConfig, OmegaConf

from fire_core.errors import UserError, did_you_mean
from fire_core.methods import available
from harness.config import compose, content_of, options, parse, resolve, runs_of
from harness.device import check_machine
from harness.settings import Domain, keys

REFUSED = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.chdir", "hydra.output_subdir")


def check_overrides(domain: Domain, overrides: list[str]) -> None:
    """Raise UserError for a key that does not exist, and for folders of Hydra, which a run does not use."""
    own = {f"method.{entry.name}" for method in available().values() for entry in fields(method)}
    known = [*(name for name in keys(domain) if name != "minutes"), "method.variant", *sorted(own)]
    for override in parse(overrides):
        key, text = override.key_or_group, override.input_line
        if key in REFUSED:
            raise UserError(f"{text}: a run's folder has its name; choose their root with run.root=FOLDER")
        if isinstance(override.value(), list) and options(key):
            raise UserError(f"{text}: a run has one {key}; a sweep has several: -m {key}=a,b")
        exists = options(key) or override.is_hydra_override()
        if not exists and not any(f"{name}.".startswith(f"{key}.") for name in known):
            same = [name for name in known if name.startswith("method.") and name.endswith(f".{key}")]
            raise UserError(f"key {key!r} does not exist{did_you_mean(*same[:1] or [key], known)}")


def check_sweep(domain: Domain, overrides: list[str]) -> list[tuple[list[str], DictConfig]]:
    """Return the overrides and the config of each run of a sweep. Raises UserError, which names every mistake once."""
    parsed = parse(overrides)
    hydras = [o.input_line for o in parsed if o.is_hydra_override()]
    typed = [o.input_line for o in parsed if not o.is_hydra_override()]
    fixed = [o.input_line for o in parsed if not o.is_sweep_override()]
    own = compose(domain, fixed).hydra.sweeper.params or {}  # what the experiment's file sweeps
    lines = [dict(text.split("=", 1) for text in line) for line in runs_of(typed)]
    names = {line["experiment"] for line in lines if "experiment" in line}
    if alone := sorted(name for name in names if len(names) > 1 and "hydra" in content_of(name)):
        raise UserError(f"experiment={alone[0]} sweeps settings of its own: start it alone")
    runs, mistakes, seeds, configs = [], {}, {}, {}
    for line in runs_of([*(f"{key}={value}" for key, value in own.items()), *typed]):
        seed = next((text for text in line if text.startswith("seed=")), "")
        others = tuple(text for text in line if text != seed)
        try:
            if seed in seeds and others in configs:  # do not compose again, which takes long
                cfg = OmegaConf.merge(configs[others], {"seed": seeds[seed]})
            else:
                cfg = resolve(domain, compose(domain, [*line, *hydras]))
                check_machine(cfg, here=not any(text.startswith("hydra/launcher=") for text in hydras))
                domain.check(cfg)
                seeds[seed], configs[others] = cfg.seed, cfg
            runs.append((line, cfg))
        except UserError as error:
            mistakes[str(error)] = None
    if mistakes:
        raise UserError("\nerror: ".join(mistakes))
    return runs
