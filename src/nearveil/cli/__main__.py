"""``python -m nearveil.cli``."""

from nearveil.cli import app

app()
