"""HumanoidBench's H1 tasks without hands. `pip install ./rl/sac/humanoid` installs them alone, as `h1_humanoid`.

    import gymnasium, h1_humanoid                    # in a clone of the suite: rl.sac.humanoid
    env = gymnasium.make("h1-walk-v0")               # link meshes from robosuite-models, as in the benchmark
    env = gymnasium.make("h1-walk-primitive-v0")     # capsules: no further package, other contacts after falls
    envs = gymnasium.make_vec("h1-walk-v0", num_envs=8, threads=4)

All environments of one process share the compiled model of their task: to change masses or friction, first give the
environment a model of its own. Ids that another package (humanoid_bench) has already registered are not replaced.
"""

import gymnasium

from .model import GEOMETRIES
from .tasks import STEPS_PER_EPISODE, TASKS

ENTRY_POINTS = {
    "entry_point": f"{__name__}.environment:HumanoidEnv",
    "vector_entry_point": f"{__name__}.environment:HumanoidVectorEnv",
}


def register() -> None:
    """Register every task in both geometries with gymnasium."""
    for task in TASKS:
        for geometry in GEOMETRIES:
            identifier = f"{task}-v0" if geometry == "mesh" else f"{task}-primitive-v0"
            if identifier not in gymnasium.registry:
                gymnasium.register(
                    identifier,
                    **ENTRY_POINTS,
                    kwargs={"task": task, "geometry": geometry},
                    max_episode_steps=STEPS_PER_EPISODE,
                )


register()
