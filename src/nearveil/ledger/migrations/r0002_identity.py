"""An identity that all copies of a ledger have, and no other ledger."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# Copies that were made before there were identities must get the same one: the hash of the first account's opening.
_FIRST = "SELECT hash FROM nearveil_entry WHERE sequence = 1 ORDER BY time, hash LIMIT 1"


def upgrade() -> None:
    """Make the table and its one row."""
    first = op.get_bind().execute(sa.text(_FIRST)).scalar_one_or_none()
    table = op.create_table("nearveil_ledger", sa.Column("identity", sa.Text, primary_key=True))
    op.bulk_insert(table, [{"identity": secrets.token_hex(16) if first is None else first[:32]}])


def downgrade() -> None:
    """Refuse: history is never dropped."""
    raise NotImplementedError("a ledger is never taken back to an older version")
