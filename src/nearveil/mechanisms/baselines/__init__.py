"""Baselines: projections and embeddings, private and not."""
