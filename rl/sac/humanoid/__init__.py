"""HumanoidBench's H1 tasks without hands, for `pip install mujoco gymnasium` alone.

    import gymnasium
    import rl.sac.humanoid
    env = gymnasium.make("h1-walk-v0")               # link meshes from robosuite-models, as in the benchmark
    env = gymnasium.make("h1-walk-primitive-v0")     # capsules: no further package, other contacts after falls
    envs = gymnasium.make_vec("h1-walk-v0", num_envs=8, threads=4)

Ids that another package (humanoid_bench) registered before are left to it.
"""

import gymnasium

from rl.sac.humanoid.tasks import STEPS_PER_EPISODE, TASKS

ENTRY_POINTS = {
    "entry_point": "rl.sac.humanoid.environment:HumanoidEnv",
    "vector_entry_point": "rl.sac.humanoid.environment:HumanoidVectorEnv",
}


def register() -> None:
    """Register every task in both geometries with gymnasium."""
    for task in TASKS:
        for geometry in ("mesh", "primitive"):
            identifier = f"{task}-v0" if geometry == "mesh" else f"{task}-primitive-v0"
            if identifier not in gymnasium.registry:
                gymnasium.register(
                    identifier,
                    **ENTRY_POINTS,
                    kwargs={"task": task, "geometry": geometry},
                    max_episode_steps=STEPS_PER_EPISODE,
                )


register()
