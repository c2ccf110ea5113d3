"""Sphinx: Markdown pages, and a reference made from the docstrings."""

import nearveil

project = "nearveil"
author = "The nearveil authors"
copyright = "The nearveil authors, Apache-2.0"
release = version = nearveil.__version__

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx-mathjax-offline", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "nearveil"
numpydoc_show_class_members = False
autodoc_typehints = "none"  # the docstrings say types in words, with shapes
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
