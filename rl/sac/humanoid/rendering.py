"""Off-screen pictures of a simulation. OpenGL is imported with the first picture."""

import atexit
import importlib
import os
import weakref
from typing import Any

import numpy as np

from fire_core.errors import UserError

from .simulator import mujoco

BACKENDS = ("egl", "osmesa", "glfw")
HELP = (
    "rendering needs off-screen OpenGL: `pip install pyopengl`, then `apt-get install libegl1` (MUJOCO_GL=egl) "
    "or `apt-get install libosmesa6` (MUJOCO_GL=osmesa)"
)


def open_context(model: mujoco.MjModel, width: int, height: int) -> tuple[Any, mujoco.MjrContext]:
    """Return (OpenGL context, MuJoCo's context in it), by the backend that MUJOCO_GL names or else the first of egl,
    osmesa and glfw that works.

    Raises UserError with the remedy and the reason of each backend if none works.
    """
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    reasons = []
    for backend in (wanted,) if wanted in BACKENDS else BACKENDS:
        try:
            opengl = importlib.import_module(f"mujoco.{backend}").GLContext(width, height)
            opengl.make_current()
            context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except Exception as error:  # each backend fails in its own way and at its own moment
            reasons.append(f"{backend}: {error}")
        else:
            return opengl, context
    raise UserError(f"{HELP} ({' '.join('; '.join(reasons).split())})")


class Camera:
    """Pictures (height, width, 3) uint8 through a named camera of the model; OpenGL is opened on first use."""

    def __init__(self, model: mujoco.MjModel, width: int, height: int, camera: str = "follow"):
        self.model, self.width, self.height, self.camera = model, width, height, camera
        self.opengl: Any = None

    def _open(self) -> None:
        opengl, self.context = open_context(self.model, self.width, self.height)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        self.scene = mujoco.MjvScene(self.model, maxgeom=1000)
        self.view = mujoco.MjvCamera()
        self.view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self.view.fixedcamid = self.model.camera(self.camera).id
        self.opengl = opengl
        self.free = weakref.finalize(self, free, opengl, self.context)
        # Freed when Python exits at the latest; weakref's own hook would run after MuJoCo has shut OpenGL down.
        self.free.atexit = False
        atexit.register(self.free)

    def image(self, data: mujoco.MjData) -> np.ndarray:
        """Return a picture of `data`, top row first."""
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
            self.free()
            atexit.unregister(self.free)
            self.opengl = None


def free(opengl: Any, context: mujoco.MjrContext) -> None:
    """Free both contexts, the inner one first. OpenGL deletes objects in the current context, so the outer one is made
    current."""
    opengl.make_current()
    context.free()
    opengl.free()
