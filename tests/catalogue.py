"""The mechanisms that ``nearveil mechanisms`` lists without computing anything.

``python -m tests.catalogue`` fits them all and writes ``mechanisms/catalogue.json``.
"""

import json
from dataclasses import asdict
from pathlib import Path

import nearveil.mechanisms
from nearveil.mechanisms import catalog

FILE = Path(nearveil.mechanisms.__file__).with_name("catalogue.json")


def describe_all() -> str:
    """Return the listing as JSON."""
    sizes = {"rows": catalog.ROWS, "features": catalog.DIMENSION, "classes": catalog.CLASSES}
    rows = [asdict(row) for row in catalog.describe_mechanisms()]
    return json.dumps({"example": {"epsilon": catalog.EPSILON, **sizes}, "mechanisms": rows}, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(describe_all())
