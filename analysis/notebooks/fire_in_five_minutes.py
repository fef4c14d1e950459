# %% [markdown]
# # FIRE in five minutes
#
# A network that is trained for long on one thing learns the next thing badly: it *loses plasticity*. FIRE replaces every
# weight matrix by the nearest orthogonal one: the directions that were learned stay, their lengths become equal.
#
# Below: train a small network on a sequence of memorisation tasks until it hardly learns any more, look at its spectrum,
# project it, and compare with the controls, which tell *what* about the projection helps.

# %%
import os

import matplotlib.pyplot as plt
import torch
from torch import nn

import fire_core
from analysis import style
from fire_core.methods import create
from fire_core.metrics import deviation_from_isometry
from fire_core.phases import Phase, State, snapshot
from fire_core.runs import generator, seeded
from vision.data import load

SMOKE = os.environ.get("FIRE_SIZE") == "smoke"
TASKS, COUNT, EPOCHS = (3, 100, 3) if SMOKE else (12, 1000, 30)
torch.set_num_threads(1)  # small matrices: more threads only wait for each other
images = load("fashion_mnist", image_size=14)
print(images)

# %% [markdown]
# ## 1. Wear a network out
# Every task: fresh images with fresh random labels, so nothing but memorising helps, and every task is as hard as the first.

# %%
pixels = images.train_images.float().flatten(1) / 255
pixels = (pixels - pixels.mean()) / pixels.std()


def task(number):
    """Images and random labels of one task; a pure function of its number."""
    chance = generator(1, "task", number)
    chosen = torch.randperm(len(pixels), generator=chance)[:COUNT]
    return pixels[chosen], torch.randint(10, (COUNT,), generator=chance)


def learn(net, number):
    """Train on one task with a fresh optimizer; share of its labels that were memorised."""
    x, y = task(number)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    chance = generator(1, "order", number)
    for _ in range(EPOCHS):
        for batch in torch.randperm(COUNT, generator=chance).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()


def fresh():
    with seeded(1, "init"):
        layers = [
            nn.Linear(196, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
        ]
        return nn.Sequential(*layers, nn.Linear(256, 10))


net = fresh()
initial = snapshot({"net": net})
memorised = [learn(net, number) for number in range(TASKS)]

plt.figure(figsize=(5, 2.8))
plt.plot(range(1, TASKS + 1), memorised, color="black", marker="s")
plt.xlabel("task")
plt.ylabel("share of labels memorised")
plt.title(f"the same network, task after task (Fashion-MNIST, {COUNT} images, one seed)")
plt.ylim(0, 1)
plt.show()

# %% [markdown]
# ## 2. Look at its spectrum
# A wide spread of singular values means that a few directions dominate and the rest hardly carry a signal. DfI, the
# deviation from isometry $\|W^\top W - I\|_F^2$, is zero when all of them are 1.

# %%
worn = {name: value.clone() for name, value in net.state_dict().items()}
matrices = [name for name, value in worn.items() if value.ndim == 2]


def variant(method, **settings):
    """A copy of the worn network after `method` at the boundary, and the method's report."""
    copy = fresh()
    copy.load_state_dict(worn)
    state = State({"net": copy}, initial=initial, generator=generator(1, "method"))
    return copy, create(method, **settings).at_boundary(state, Phase(1))


projected, report = variant("fire", iterations=10)
figure, axes = plt.subplots(1, len(matrices), figsize=(3 * len(matrices), 2.6))
for axis, name in zip(axes, matrices):
    spectra = {
        "fresh": (initial["net"][name], "#7F7F7F"),
        "worn": (worn[name], "#000000"),
        "after FIRE": (projected.state_dict()[name], "#D55E00"),
    }
    values = {title: torch.linalg.svdvals(weights).numpy() for title, (weights, _) in spectra.items()}
    top = max(found.max() for found in values.values()) * 1.05
    for title, (_, colour) in spectra.items():
        axis.hist(values[title], bins=40, range=(0, top), histtype="step", color=colour, label=title)
    axis.set_yscale("log")
    axis.set_title(name)
    axis.set_xlabel("singular value")
axes[0].legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# The report says the same in numbers, one row a matrix. `factor` is the DfI before the layer's scale is applied: ten
# published iterations do not make a square matrix orthogonal to the last digit. `fire_exact` does.

# %%
print(report)

# %%
places = range(len(matrices))
plt.figure(figsize=(5.5, 2.8))
for shift, (title, net_) in enumerate(
    {"worn": None, "fire": projected, "fire_exact": variant("fire_exact")[0]}.items()
):
    weights = worn if net_ is None else net_.state_dict()
    colour = "#000000" if title == "worn" else style.look(title).colour
    heights = [deviation_from_isometry(weights[name]).item() for name in matrices]
    plt.bar([place + 0.27 * shift for place in places], heights, width=0.25, color=colour, label=title)
plt.xticks([place + 0.27 for place in places], matrices)
plt.yscale("log")
plt.ylabel("DfI of the stored weight")
plt.legend()
plt.show()

# %% [markdown]
# ## 3. Does it learn again? And is it the orthogonality?
# Each method starts from the same worn network and learns the next tasks. The controls: `rescale` gives every matrix the
# norm FIRE would give it but keeps its spectrum; `random_orthogonal` has FIRE's spectrum and remembers nothing.

# %%
methods = ["none", "fire", "fire_exact", "shrink_perturb", "full_reset", "rescale", "random_orthogonal"]
NEXT = 1 if SMOKE else 2
rows = {}
for method in methods:
    copies = [variant(method) for _ in range(NEXT)]
    accuracy = sum(learn(copy, TASKS + k) for k, (copy, _) in enumerate(copies)) / NEXT
    after, told = variant(method)
    dfi = sum(deviation_from_isometry(after.state_dict()[name]).item() for name in matrices)
    moved = sum((after.state_dict()[name] - worn[name]).square().sum().item() for name in matrices)
    rows[method] = accuracy, dfi, moved
    print(
        f"{style.look(method).name:<30} memorised {accuracy:.3f}   DfI {dfi:9.2f}   moved (SFE) {moved:9.1f}"
    )

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
for method, (accuracy, dfi, moved) in rows.items():
    look = style.look(method)
    axes[0].scatter(max(dfi, 1e-6), accuracy, color=look.colour, marker=look.marker, label=look.name, s=45)
    axes[1].scatter(moved, accuracy, color=look.colour, marker=look.marker, s=45)
axes[0].set_xscale("log")
axes[0].set_xlabel("DfI right after the boundary")
axes[1].set_xlabel("SFE: squared distance moved")
axes[0].set_ylabel("memorised on the next tasks")
axes[1].legend(*axes[0].get_legend_handles_labels(), fontsize=7)
figure.tight_layout()
plt.show()

# %% [markdown]
# One seed and a toy: a picture of the idea, not a result. Results with seeds and intervals are in `REPRODUCED.md`.
#
# In a training loop of your own it is one line between two phases:

# %%
model = fresh()
print(fire_core.fire(model, iterations=10).summary())
