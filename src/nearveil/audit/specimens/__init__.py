"""Specimens: mechanisms that are broken on purpose. An audit that does not catch them is blind."""
