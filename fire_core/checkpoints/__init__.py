"""FIRE on checkpoint files: reading, projecting and inspecting weights, and the command line."""
