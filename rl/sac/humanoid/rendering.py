"""Pictures of a simulation, off screen. Nothing of OpenGL is imported before the first picture."""

import importlib
import os
from typing import Any

import mujoco
import numpy as np

from fire_core.errors import UserError

BACKENDS = ("egl", "osmesa", "glfw")
HELP = (
    "rendering needs off-screen OpenGL: `pip install pyopengl`, then `apt-get install libegl1` (MUJOCO_GL=egl) "
    "or `apt-get install libosmesa6` (MUJOCO_GL=osmesa)"
)


def open_context(width: int, height: int) -> Any:
    """An OpenGL context: the backend named by MUJOCO_GL, else the first of egl, osmesa, glfw that works.

    Raises UserError with the remedy and each backend's reason where none does.
    """
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    reasons = []
    for backend in (wanted,) if wanted in BACKENDS else BACKENDS:
        try:
            return importlib.import_module(f"mujoco.{backend}").GLContext(width, height)
        except (
            Exception
        ) as error:  # each backend fails in its own way: ImportError, AttributeError, RuntimeError
            reasons.append(f"{backend}: {error}")
    raise UserError(f"{HELP} ({' '.join('; '.join(reasons).split())})")


class Camera:
    """Renders to (height, width, 3) uint8 arrays through a named camera of the model; opened on first use."""

    def __init__(self, model: mujoco.MjModel, width: int, height: int, camera: str = "follow"):
        self.model, self.width, self.height = model, width, height
        self.view = mujoco.MjvCamera()
        self.view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self.view.fixedcamid = model.camera(camera).id
        self.opengl: Any = None

    def _open(self) -> None:
        self.opengl = open_context(self.width, self.height)
        self.opengl.make_current()
        self.context = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        self.scene = mujoco.MjvScene(self.model, maxgeom=1000)

    def image(self, data: mujoco.MjData) -> np.ndarray:
        """A picture of `data`, top row first."""
        if self.opengl is None:
            self._open()
        self.opengl.make_current()
        area = mujoco.MjrRect(0, 0, self.width, self.height)
        every = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self.model, data, mujoco.MjvOption(), None, self.view, every, self.scene)
        mujoco.mjr_render(area, self.scene, self.context)
        picture = np.empty((self.height, self.width, 3), np.uint8)
        mujoco.mjr_readPixels(picture, None, area, self.context)
        return picture[::-1].copy()

    def close(self) -> None:
        """Free the OpenGL context."""
        if self.opengl is not None:
            self.context.free()
            self.opengl.free()
            self.opengl = None
