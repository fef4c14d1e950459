"""MuJoCo, imported here before anywhere else. Raises UserError with a remedy if it does not load.

Ctrl-C during the import takes effect right after it, because the import would report it as a module that is missing.
"""

import os

from fire_core.errors import UserError
from harness import stop

try:
    with stop.postponed():
        import mujoco
except Exception as error:  # MuJoCo opens the OpenGL library that MUJOCO_GL names as soon as it is imported
    missing = isinstance(error, ModuleNotFoundError) or "MUJOCO_GL" not in os.environ
    remedy = "make install-sac" if missing else "unset MUJOCO_GL, only pictures need it"
    raise UserError(f"MuJoCo does not load ({error}): {remedy}") from error

__all__ = ["mujoco"]
