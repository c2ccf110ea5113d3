"""The server of galleries: requests, limits, tokens, logs, and the processes that serve."""
