"""Retrievers for other libraries. Each needs the extra of its name."""
