"""``nearveil`` and ``python -m nearveil``."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, also while it is imported."""
    try:
        from nearveil.cli import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":  # processes that a server starts import this, too
    main()
