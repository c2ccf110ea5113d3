"""Accounts, quotas and entries."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "nearveil_account",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("opening", sa.Text, nullable=False),
        sa.Column("terms", sa.Text, nullable=False),
        sa.Column("totals", sa.Text, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("head", sa.Text, nullable=False),
    )
    op.create_table(
        "nearveil_quota",
        sa.Column("account", sa.Text, sa.ForeignKey("nearveil_account.name"), primary_key=True),
        sa.Column("client", sa.Text, primary_key=True),
        sa.Column("terms", sa.Text, nullable=False),
        sa.Column("totals", sa.Text, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "nearveil_entry",
        sa.Column("account", sa.Text, sa.ForeignKey("nearveil_account.name"), primary_key=True),
        sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("time", sa.Text, nullable=False),
        sa.Column("key", sa.Text),
        sa.Column("client", sa.Text),
        sa.Column("nonce", sa.Text, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("client_state", sa.Text),
        sa.Column("hash", sa.Text, nullable=False),
        # Every lookup has one index that serves it, and only one: a planner that knows nothing of a new table yet
        # would take another that reads all entries of the account, and would keep to it.
        sa.Column("slot", sa.Text, unique=True),
    )


def downgrade() -> None:
    """Refuse: history is never dropped."""
    raise NotImplementedError("a ledger is never taken back to an older version")
