"""Attacks: each plays a game with a mechanism and measures what it wins."""
