"""Which methods run in which training script. `python -m harness.domains vision` names those of one, for a sweep."""

import sys

from fire_core.errors import UserError, did_you_mean
from fire_core.methods import Method, available

DOMAINS = ("vision", "language", "dqn", "sac")
# Methods that are not listed run everywhere. CBP, DASH, ReDo and SNR need one net with its batches, plasticity injection an
# encoder and a head; outside of DQN `fire` is already what `fire_all` is there. `fire_muon` is a question about
# supervised training.
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
    """Names of the methods that run in a domain."""
    if domain not in DOMAINS:
        raise UserError(f"domain {domain!r} does not exist{did_you_mean(domain, DOMAINS)}")
    return [name for name in available() if domain in RUNS_IN.get(name, DOMAINS)]


def check_runs_in(method: Method, domain: str) -> None:
    """Refuse a method that does not run in this script."""
    known, name = RUNS_IN.get(method.name, DOMAINS), method.name
    if method.variant == "official":  # it follows the authors' image code
        known, name = ("vision",), f"{method.name} method.variant=official"
    if domain not in known:
        raise UserError(f"method={name} does not run in {domain} ({', '.join(known)} only)")


if __name__ == "__main__":
    print(",".join(methods_of(*sys.argv[1:])))
