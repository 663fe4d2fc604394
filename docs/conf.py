"""Settings of the site: Sphinx reads the Markdown of the repository where it is, and as it is.

`make docs` builds it. What is on it, and in which order, is in `site_pages.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

import site_pages  # noqa: E402 - found by the line above

import millstream  # noqa: E402 - after the path is set

project = "Millstream"
author = "the developers of Millstream"
copyright = author  # noqa: A001 - Sphinx's word
version = release = millstream.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = site_pages.HOME
# The tree is read from its root, so that a link to README.md, to an example or to a manifest is one here, too.
include_patterns = ["*.md", "docs/**.md", "benchmarks/*.md"]
exclude_patterns = [
    path.name
    for path in ROOT.iterdir()
    if path.is_dir() and path.name not in ("docs", "benchmarks")
]

# Headings have the anchors that the pages have where the repository is looked at.
myst_heading_anchors = 4
highlight_language = "text"

# Docstrings are reStructuredText, in the sections that Google's style has. A single backtick is code.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "Millstream"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False  # the pages themselves are beside what is made of them: see site_pages
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6b61", "color-brand-content": "#0b6b61"},
    "dark_css_variables": {"color-brand-primary": "#4fc3b5", "color-brand-content": "#4fc3b5"},
    "top_of_page_buttons": [],
}
pygments_style = "default"
pygments_dark_style = "github-dark"

setup = site_pages.setup
