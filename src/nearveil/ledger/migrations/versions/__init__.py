"""One file for each version; alembic reads them."""
