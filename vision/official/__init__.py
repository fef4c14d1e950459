"""What the authors' FIRE code does with images and ours does not by default: `switches`, and the variants of methods.

Importing this package registers the variants, so that `create(name, variant="official")` finds them. The numbers that
they reproduce are in `tests/official/methods/`, and docs/DEVIATIONS.md lists every difference.
"""

from vision.official import cbp, dash, muon, resets  # noqa: F401
