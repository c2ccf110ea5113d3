"""The ledger's tables, version by version."""
