"""Covers and cells: a message names one set of a public map."""
