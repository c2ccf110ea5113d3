"""Clients of galleries: one asynchronous core, and a blocking client over it."""
