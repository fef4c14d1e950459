"""HumanoidBench's H1 tasks without hands: `gymnasium.make("h1-walk-v0")` after `import rl.sac.humanoid`.

"h1-walk-v0" needs the link meshes of robosuite-models, as in the benchmark; "h1-walk-primitive-v0" has capsules, needs no
further package, and has other contacts after falls. All environments of one process share the compiled model of their task:
to change masses or friction, first give the environment a model of its own. Ids of other packages are not replaced.
"""

import gymnasium

from .tasks import GEOMETRIES, STEPS_PER_EPISODE, TASKS

for task in TASKS:
    for geometry in GEOMETRIES:
        identifier = f"{task}-v0" if geometry == "mesh" else f"{task}-primitive-v0"
        if identifier not in gymnasium.registry:
            entry, given = f"{__name__}.environment:HumanoidEnv", {"task": task, "geometry": geometry}
            gymnasium.register(identifier, entry, max_episode_steps=STEPS_PER_EPISODE, kwargs=given)
