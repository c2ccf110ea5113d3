"""Sphinx: Markdown pages, and a reference made from the docstrings."""

import shutil
from pathlib import Path

from sphinx.application import Sphinx

import nearveil

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


def setup(app: Sphinx) -> None:
    """Register the copy."""
    app.connect("build-finished", copy_pages)
