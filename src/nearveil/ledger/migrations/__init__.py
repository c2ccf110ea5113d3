"""The ledger's tables, a file for each version; alembic reads them."""
