# %% [markdown]
# # Figure 3: continual pretraining of a small GPT
#
# The question: after many passes over corpus A, which boundary lets the model learn the mixture with B best?
# Runs are read from `runs/` where they are, else from the committed results in `analysis/results/`.

# %%
import os

import matplotlib.pyplot as plt
import pandas as pd

from analysis import curves, fig3
from analysis.figure import experiment_of, open_results, plain
from analysis.result_tables import boundary_table, contrast_table, end_value_table

pd.set_option("display.width", 160, "display.max_columns", 20, "display.max_colwidth", 60)
ROOT = os.environ.get("FIRE_RUNS", "runs")
SIZE = os.environ.get("FIRE_SIZE", "small")
results = open_results(ROOT, SIZE, ("fig3",))
parts = [plain(part) for part in curves.settings(results) if len(part.metrics)]
print(f"{len(results.finished)} finished runs of size {SIZE} in {len(parts)} settings")

# %% [markdown]
# ## The figure

# %%
if parts:
    fig3.draw(parts, False)
    plt.show()

# %% [markdown]
# ## The numbers behind it
# End values with 95 % intervals over seeds; differences paired by seed.

# %%
for part in parts:
    print(f"\n{experiment_of(part)}, data {part.finished['data'].iloc[0]}")
    print(end_value_table(part).to_string(index=False))

# %% [markdown]
# ## FIRE against each other method, controls included

# %%
for part in parts:
    print(f"\n{experiment_of(part)}")
    print(contrast_table(part).to_string(index=False))

# %% [markdown]
# ## Right after the boundary
# How far each method moved the weights, and how orthogonal it left them.

# %%
print(boundary_table(results).to_string(index=False))
