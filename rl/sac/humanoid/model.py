"""MuJoCo model of the Unitree H1 with position servos, written as MJCF from the tables in this folder.

`geometry="mesh"`: every link collides as the convex hull of its mesh; the STL files are from the PyPI package
robosuite-models, the foot from the 32 points of ankle.csv. `geometry="primitive"`: the same masses, joints and
actuators, the same foot, and capsules in place of the other meshes (capsules.csv), without a further package. The two
differ in contacts after a fall, so their returns are not comparable and their names differ everywhere.

The numbers are those of the H1 description (BSD-3-Clause, Unitree, see LICENSE.unitree) with the servos, sites and
balance board of HumanoidBench (Sferrazza et al., 2024, arXiv 2403.10506).
"""

import csv
import importlib.util
from functools import lru_cache
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from fire_core.errors import UserError

TABLES = Path(__file__).parent
GEOMETRIES = ("mesh", "primitive")
PHYSICS_STEP = 0.002
BOARD_HALF_SIZE = "0.15 0.55 0.03"
PIVOT_RADIUS = "0.17"


def rows(table: str) -> list[dict[str, str]]:
    """Return the lines of `<table>.csv` in this folder, as dicts of strings."""
    with (TABLES / f"{table}.csv").open(newline="") as handle:
        return list(csv.DictReader(handle))


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
    """Return the model as an MJCF document; `board` adds the balance board and its pivot.

    Raises UserError if meshes are missing.
    """
    root = Element("mujoco", model=f"h1_{geometry}{'_board' if board else ''}")
    # Bodies of the robot carry their inertia; the board and the pivot take theirs from their geoms.
    SubElement(root, "compiler", angle="radian", inertiafromgeom="auto", autolimits="true")
    SubElement(
        root,
        "option",
        timestep=str(PHYSICS_STEP),
        integrator="Euler",
        solver="Newton",
        cone="pyramidal",
        iterations="100",
        ls_iterations="50",
    )
    _add_assets(SubElement(root, "asset"), geometry)
    _add_world(SubElement(root, "worldbody"), geometry, board)
    _add_actuators(SubElement(root, "actuator"))
    SubElement(SubElement(root, "sensor"), "subtreelinvel", name="velocity", body="pelvis")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode")


def _add_assets(asset: Element, geometry: str) -> None:
    points = []
    for row in rows("ankle"):
        points += [
            f"{row[x]} {sign}{row['half_width']} {row['z']}" for x in ("back", "front") for sign in ("", "-")
        ]
    SubElement(asset, "mesh", name="ankle", vertex=" ".join(points))
    if geometry == "mesh":
        folder = mesh_folder()
        for name in sorted({row["mesh"] for row in rows("geoms") if row["mesh"]}):
            if "ankle" not in name:
                SubElement(asset, "mesh", name=name, file=str(folder / f"{name}.STL"))


def _add_world(world: Element, geometry: str, board: bool) -> None:
    SubElement(world, "geom", name="floor", type="plane", size="20 20 1")
    bodies = {"world": world}
    for row in rows("bodies"):
        body = SubElement(bodies[row["parent"]], "body", name=row["body"], pos=row["pos"], quat=row["quat"])
        bodies[row["body"]] = body
        if float(row["mass"]) > 0:
            where = {"pos": row["inertial_pos"], "quat": row["inertial_quat"]}
            SubElement(body, "inertial", **where, mass=row["mass"], diaginertia=row["diag_inertia"])
    for row in rows("joints"):
        extra = {"range": row["range"]} if row["range"] else {}
        numbers = {"axis": row["axis"], "damping": row["damping"], "armature": row["armature"], **extra}
        if row["type"] == "free":
            numbers = {}
        SubElement(bodies[row["body"]], "joint", name=row["joint"], type=row["type"], **numbers)
    for row in rows("geoms"):
        _add_geom(bodies[row["body"]], row, geometry)
    for row in rows("sites"):
        SubElement(
            bodies[row["body"]], "site", name=row["site"], pos=row["pos"], quat=row["quat"], size="0.01"
        )
    if board:
        _add_board(world)


def _add_geom(body: Element, row: dict[str, str], geometry: str) -> None:
    visual = row["role"] == "visual"
    if visual and geometry == "primitive":
        return
    collides = "0" if visual else "1"
    shape = {"type": row["type"]}
    if "ankle" in row["mesh"]:
        shape["mesh"] = "ankle"
    elif row["type"] == "mesh" and geometry == "mesh":
        shape["mesh"] = row["mesh"]
    elif row["type"] == "mesh":
        capsule = next(c for c in rows("capsules") if c["body"] == row["body"])
        shape = {"type": "capsule", **{key: capsule[key] for key in ("size", "pos", "quat")}}
    else:
        shape |= {key: row[key] for key in ("size", "pos", "quat")}
    SubElement(body, "geom", **shape, contype=collides, conaffinity=collides)


def _add_board(world: Element) -> None:
    board = SubElement(world, "body", name="board", pos="0 0 0.37")
    SubElement(board, "freejoint", name="board")
    SubElement(board, "geom", name="board", type="box", size=BOARD_HALF_SIZE)
    pivot = SubElement(world, "body", name="pivot", pos="0 0 0.17")
    SubElement(pivot, "geom", name="pivot", type="sphere", size=PIVOT_RADIUS)


def _add_actuators(actuator: Element) -> None:
    for row in rows("actuators"):
        SubElement(
            actuator,
            "general",
            name=row["actuator"],
            joint=row["joint"],
            ctrlrange=row["ctrlrange"],
            forcerange=row["forcerange"],
            biastype="affine",
            gainprm=row["stiffness"],
            biasprm=f"0 -{row['stiffness']} -{row['damping']}",
        )
