"""Count words that keep strangers out of source and documentation: ``python -m tests.english [package | docs ...]``.

`make check` runs it on everything and fails above `LIMITS`. A reminder, not a straitjacket: where such a word
is the right one, use it and add a comment if the reason is not plain.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_SOURCES = _ROOT / "src" / "nearveil"
_TEXTS = ("docs/**/*.md", "deploy/*", "*.md")  # their phrases count, too
_NAMES = frozenset(
    [
        "found",
        "one",
        "held",
        "some",
        "kept",
        "place",
        "given",
        "known",
        "own",
        "told",
        "others",
        "those",
        "these",
        "taken",
        "asked",
        "wanted",
        "meant",
    ]
)
_PHRASES = re.compile(
    r"\b(what is|what was|what it|whoever|whose|anew|told|tells?|lies?|for nothing|where there (is|are)|altogether|"
    r"some (hundred|thousand)|under way|stranger)\b",
    re.IGNORECASE,
)
LIMITS = {"names": 10, "phrases": 105}


def find_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every assignment to a pronoun or participle."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in _NAMES:
            yield node.lineno, node.id


def find_phrases(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every listed phrase."""
    for match in _PHRASES.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match.group().lower()


def main(packages: list[str]) -> int:
    """Print the places of packages or folders, or the totals of all; return 1 if a total is above its limit."""
    totals: Counter[str] = Counter()
    texts = [path for pattern in _TEXTS for path in sorted(_ROOT.glob(pattern)) if path.is_file()]
    for path in [*sorted(_SOURCES.rglob("*.py")), *texts]:
        base = _ROOT if path in texts else _SOURCES
        if packages and path.relative_to(base).parts[0] not in packages:
            continue
        text = path.read_text(encoding="utf-8")
        names = find_names(text) if path.suffix == ".py" else ()
        for kind, places in (("names", names), ("phrases", find_phrases(text))):
            for line, word in places:
                totals[kind] += 1
                if packages:
                    print(f"{path}:{line}: {word}")  # noqa: T201
    print(", ".join(f"{totals[kind]} {kind} (limit {limit})" for kind, limit in LIMITS.items()))  # noqa: T201
    return int(not packages and any(totals[kind] > limit for kind, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
