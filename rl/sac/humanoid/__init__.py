"""HumanoidBench's H1 tasks without hands.

    import gymnasium, rl.sac.humanoid
    env = gymnasium.make("h1-walk-v0")               # link meshes from robosuite-models, as in the benchmark
    env = gymnasium.make("h1-walk-primitive-v0")     # capsules: no further package, other contacts after falls

All environments of one process share the compiled model of their task: to change masses or friction, first give the
environment a model of its own. Ids that another package has already registered are not replaced.
"""

import gymnasium

from .tasks import GEOMETRIES, STEPS_PER_EPISODE, TASKS

for task in TASKS:
    for geometry in GEOMETRIES:
        identifier = f"{task}-v0" if geometry == "mesh" else f"{task}-primitive-v0"
        if identifier not in gymnasium.registry:
            entry, given = f"{__name__}.environment:HumanoidEnv", {"task": task, "geometry": geometry}
            gymnasium.register(identifier, entry, max_episode_steps=STEPS_PER_EPISODE, kwargs=given)
