"""Paired trials of methods on copies of a network: fire_core/trial.py.

What should win on planted faults was written down before any trial was run. The network is a small MLP with ReLU, trained
with Adam; the new phase continues its task unless it says otherwise, and the methods are those of `METHODS` and `redo`:

| fault | should win | should not be shown ahead of none |
| --- | --- | --- |
| half of the units dead: bias -10, the task needs the capacity (random labels) | redo or full_reset | clear, rescale |
| collapsed rank: each hidden matrix reduced to its first singular vectors | fire or full_reset | clear, rescale |
| weights 10 times too large, no bias: the function is there, its scale is wrong | rescale | clear |
| stale moments: Adam's second moments are 10^6 times too large after the old data; the weights fit the new data well | clear | fire, rescale, shrink_perturb, full_reset |
| nothing: mid-training, the same data go on | none in at least 95 % of the trials | |

"Only clear helps" for stale moments means: with optimizer_state="keep", so that every other method is its treatment of the
weights alone. By default ("clear_changed") the others clear moments too and may come out ahead of none; then `clear` must be
ahead as well, which says that the treatment of the weights explains nothing.
A winner is a `best` that is neither None nor "none": where every method does harm, naming "none" is right.
"""
