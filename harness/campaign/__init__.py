"""A manifest of runs as one command: what will be trained in which order and for how long, then the training itself.

python -m harness.campaign paper --plan
python -m harness.campaign medium --budget 8h
"""
