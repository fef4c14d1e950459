"""FIRE on models whose parameters are spread over several processes."""
