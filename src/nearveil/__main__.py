"""``nearveil`` and ``python -m nearveil``."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C exits without a traceback, even during imports."""
    try:
        from nearveil.cli import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":  # worker processes of a server import this module
    main()
