"""The site: `make site`. Its sources are the repository's own documents, where they lie."""

from pathlib import Path

import sphinx.application

project = "deepmoe"
author = "The deepmoe authors"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "*/README.md", "experiments/*/README.md"]
exclude_patterns = [".*", "**/.*", "build", "runs", "data"]
myst_heading_anchors = 4  # the anchors that GitHub gives, so that links work in both places
nitpicky = True
html_theme = "furo"
html_title = "deepmoe"
html_static_path: list[str] = []


def redirect(app: sphinx.application.Sphinx, failed: Exception | None) -> None:
    """The site's first page, which lies in a folder of its own."""
    if failed is None:
        page = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: sphinx.application.Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("build-finished", redirect)
