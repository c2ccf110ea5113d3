"""Mechanisms that send a noisy vector."""
