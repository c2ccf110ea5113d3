"""Pages: links that Sphinx does not check lead somewhere, and the notebooks print what they show."""

import re
from pathlib import Path

import pytest

from tests import notebooks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOKS = [f"docs/notebooks/{name}.ipynb" for name in notebooks.NAMES]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def list_links(page: Path) -> list[tuple[Path, str]]:
    """Return the files and headings that a page links to in the repository."""
    text = re.sub(r"^(```).*?^\1|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = [link.partition("#") for link in LINK.findall(text) if not re.match("[a-z]+:", link)]
    return [((page.parent / path).resolve() if path else page, heading) for path, _, heading in links]


def list_headings(page: Path) -> set[str]:
    """Return the headings of a page as fragments of its address."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/llms.txt", *NOTEBOOKS])
def test_links(name: str) -> None:
    links = list_links(ROOT / name)
    assert links
    assert [path for path, _ in links if not path.exists()] == []
    assert [(path, heading) for path, heading in links if heading and heading not in list_headings(path)] == []


def test_language_models_find_every_page() -> None:
    named = {path for path, _ in list_links(DOCS / "llms.txt")}
    assert set((DOCS / "howto").glob("*.md")) | {path for path in DOCS.glob("*.md") if path.stem != "index"} <= named


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_notebooks(name: str) -> None:
    stored, run = notebooks.load(name), notebooks.load(name)
    notebooks.run_cells(run, name)
    assert run["cells"] == stored["cells"]
