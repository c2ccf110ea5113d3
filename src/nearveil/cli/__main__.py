"""``python -m nearveil.cli``."""

from nearveil.cli import app

if __name__ == "__main__":  # processes that a server starts import this, too
    app()
