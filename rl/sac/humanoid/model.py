"""MuJoCo model of the Unitree H1 with position servos: `h1.xml`, reduced to what a task needs.

`geometry="mesh"`: every link collides as the convex hull of its mesh; the STL files are from the PyPI package
robosuite-models. `geometry="primitive"`: the same masses, joints, actuators and feet, and capsules in place of the other
meshes, without a further package. The two differ in contacts after a fall, so their returns are not comparable and their
names differ everywhere.
"""

import importlib.util
from functools import lru_cache
from pathlib import Path
from xml.etree import ElementTree

from fire_core.errors import UserError

GEOMETRIES = ("mesh", "primitive")


def mesh_folder() -> Path:
    """Return the folder of the H1 STL files inside the installed robosuite-models package, which is not imported.
    Raises UserError without it."""
    spec = importlib.util.find_spec("robosuite_models")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "geometry 'mesh' needs the H1 meshes of robosuite-models: make install-sac "
            "(or use a task with 'primitive' in its name, which needs none)"
        )
    folder = Path(spec.submodule_search_locations[0]) / "assets" / "robots" / "h1" / "meshes"
    if not (folder / "pelvis.STL").exists():
        raise UserError(f"there are no H1 meshes in {folder}: delete it and run make install-sac again")
    return folder


@lru_cache
def mjcf(geometry: str, board: bool = False) -> str:
    """Return the model as an MJCF document, with or without the balance board and its pivot.

    Raises UserError if meshes are missing.
    """
    root = ElementTree.parse(Path(__file__).parent / "h1.xml").getroot()
    assets, world = root.find("asset"), root.find("worldbody")
    left_out = {"mesh": ["primitive"], "primitive": ["mesh", "visual"]}[geometry]
    for body in root.iter("body"):
        for geom in body.findall("geom"):
            if geom.get("class") in left_out:
                body.remove(geom)
    if geometry == "mesh":
        root.find("compiler").set("meshdir", str(mesh_folder()))
    else:
        for mesh in assets.findall("mesh[@file]"):
            assets.remove(mesh)
    for name in () if board else ("board", "pivot"):
        world.remove(world.find(f"body[@name='{name}']"))
    return ElementTree.tostring(root, encoding="unicode")
