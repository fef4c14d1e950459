"""FIRE on files of weights, without building the model."""
