"""MuJoCo, imported here before anywhere else. Raises UserError with a remedy if it does not load.

Ctrl-C during the import takes effect right after it, because the import would report it as a module that is missing.
"""

import os

from fire_core.errors import UserError
from harness import stop

try:
    with stop.postponed():
        import mujoco
except ImportError as error:
    raise UserError(f"MuJoCo is missing ({error}): pip install 'mujoco>=3.1.6,<5'") from error
except Exception as error:  # MuJoCo opens the OpenGL library that MUJOCO_GL names as soon as it is imported
    raise UserError(
        f"MuJoCo does not load with MUJOCO_GL={os.environ.get('MUJOCO_GL', '')!r}: unset it, only pictures need it, or "
        f"install that library (osmesa: apt-get install libosmesa6, egl: apt-get install libegl1) ({error})"
    ) from error

__all__ = ["mujoco"]
