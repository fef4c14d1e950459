"""Plan and train all runs of a manifest with one command.

python -m harness.campaign paper --plan
python -m harness.campaign medium --budget 8h
"""
