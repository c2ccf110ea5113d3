"""Run the notebooks of the documentation: `python -m tests.notebooks` rewrites their outputs."""

import ast
import contextlib
import io
import json
import linecache
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def load(name: str) -> dict[str, Any]:
    """Return a notebook as JSON."""
    return dict(json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")))


def run_cells(notebook: dict[str, Any], name: str) -> None:
    """Execute the code cells in order, and replace their outputs."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            cell["outputs"] = _run("".join(cell["source"]), f"{name}.ipynb:{number}", namespace)


def _run(source: str, title: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Execute one cell; return what it prints, then the value of its last line."""
    linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)  # for tracebacks
    body, value = ast.parse(source).body, None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), title, "exec"), namespace)  # noqa: S102
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), title, "eval"), namespace)  # noqa: S307
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append(
            {"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)}
        )
    if value is not None:
        result = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": result})
    return outputs


if __name__ == "__main__":
    for stem in sys.argv[1:] or NAMES:
        changed = load(stem)
        run_cells(changed, stem)
        (FOLDER / f"{stem}.ipynb").write_text(
            json.dumps(changed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
