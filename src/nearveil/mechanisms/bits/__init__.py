"""Mechanisms that flip bits: LATENT, OME, unary encoding."""
