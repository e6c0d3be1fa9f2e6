"""Sphinx configuration of the site that `make docs` builds.

The source folder is the repository, so the links between pages are the same on a forge and in the site.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gradwire

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))  # for docs/website

project = "gradwire"
author = "the gradwire authors"
project_copyright = author
version = release = gradwire.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "website"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*/*.md", "examples/**.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "dist", "native", "src", "tests"]
nitpick_ignore_regex = [
    (r"py:.*", r"(?!gradwire).*"),  # other projects' names are not linked: the build works offline
    # Type variables, protocols and internal types.
    (r"py:class", r"gradwire\..*\.([A-Z]|HasGroup|settings\.Setting|bucket_reduction\.Compression)"),
    (r"py:class", r"gradwire\.training\.(sampling_progress\.Run|sampler\.Batch)"),
]

myst_enable_extensions = ["deflist"]  # for the options of commands
myst_heading_anchors = 4
smartquotes = False  # options such as --min keep their hyphens

autodoc_mock_imports = ["jax", "gradwire.jax.traced", "torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
python_display_short_literal_types = True
add_module_names = False

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"gradwire {release}"
html_static_path = ["website/style.css"]
html_css_files = ["style.css"]
html_extra_path = ["website/index.html"]
html_copy_source = False
html_show_sphinx = False
