"""Sphinx: Markdown pages, and a reference made from the docstrings."""

import os
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command
from typer.testing import CliRunner

import nearveil
from nearveil.cli import app as command_line

project = "nearveil"
author = "The nearveil developers"
copyright = "The nearveil developers, Apache-2.0"
release = version = nearveil.__version__

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx-mathjax-offline", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "nearveil"
html_static_path = ["_static"]
html_css_files = ["cards.css"]
html_extra_path = ["llms.txt"]
numpydoc_show_class_members = False
autodoc_typehints = "none"  # the docstrings say types in words, with shapes
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]


def copy_pages(app: Sphinx, error: Exception | None) -> None:
    """Copy the Markdown pages and notebooks beside the HTML: llms.txt links to them."""
    if error is None and app.builder.name == "html":
        for name in app.env.found_docs:
            shutil.copyfile(app.env.doc2path(name), Path(app.outdir, f"{name}.md"))
        shutil.copytree(Path(app.srcdir, "notebooks"), Path(app.outdir, "notebooks"), dirs_exist_ok=True)


class CommandHelp(SphinxDirective):
    """The help of every command, as a terminal of 80 columns shows it."""

    def run(self) -> list[nodes.Node]:
        os.environ["COLUMNS"] = "80"
        return list(self.describe(get_command(command_line)))

    def describe(self, command: Any, *path: str) -> Any:
        """Yield a heading and the help of a command, then those of its subcommands."""
        help_text = CliRunner().invoke(command_line, [*path, "--help"], prog_name="nearveil").output
        yield nodes.rubric(text=" ".join(["nearveil", *path]))
        yield nodes.literal_block(text="\n".join(map(str.rstrip, help_text.strip("\n").splitlines())), language="text")
        for name, child in getattr(command, "commands", {}).items():
            yield from self.describe(child, *path, name)


def setup(app: Sphinx) -> None:
    """Register the copy and the help of commands."""
    app.add_directive("command-help", CommandHelp)
    app.connect("build-finished", copy_pages)
