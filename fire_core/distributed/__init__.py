"""Treatments of models whose parameters are replicated or sharded over several processes."""
