"""The methods that run in each training script. `python -m harness.domains vision` prints those of vision."""

import sys

from fire_core.errors import UserError, did_you_mean
from fire_core.methods import Method, available

DOMAINS = ("vision", "language", "dqn", "sac")
# Methods that are not listed run everywhere. CBP, DASH, ReDo and SNR need one net with its batches; plasticity
# injection needs an encoder and a head. `fire_all` is for DQN: in the other domains `fire` does the same. `fire_muon`
# is for supervised training.
ONE_NET = ("vision", "language", "dqn")
RUNS_IN = {
    "cbp": ONE_NET,
    "dash": ONE_NET,
    "redo": ONE_NET,
    "snr": ONE_NET,
    "plasticity_injection": ("dqn", "sac"),
    "fire_all": ("dqn",),
    "fire_muon": ("vision", "language"),
}


def methods_of(domain: str) -> list[str]:
    """Return the names of the methods that run in a domain. Raises UserError for an unknown domain."""
    if domain not in DOMAINS:
        raise UserError(f"domain {domain!r} does not exist{did_you_mean(domain, DOMAINS)}")
    return [name for name in available() if domain in RUNS_IN.get(name, DOMAINS)]


def check_runs_in(method: Method, domain: str) -> None:
    """Raise UserError for a method that does not run in this domain."""
    known, name = RUNS_IN.get(method.name, DOMAINS), method.name
    if method.variant == "official":  # it follows the authors' image code
        known, name = ("vision",), f"{method.name} method.variant=official"
    if domain not in known:
        raise UserError(f"method={name} does not run in {domain} ({', '.join(known)} only)")


if __name__ == "__main__":
    print(",".join(methods_of(*sys.argv[1:])))
