"""Settings of Sphinx. The site shows the repository's own Markdown files and notebooks, in their own folders.

So a relative link works on the site as it does in a checkout, and nothing is written twice.
"""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
FOLDER_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:]+)\)")
# up to a blank line or the start of the next section
SECTION = re.compile(r"^(Returns|Raises): +(?:UserError\b)?(.*(?:\n(?!\s*$|[A-Z]\w*:).*)*)", re.MULTILINE)

project = "FIRE"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
pages = re.findall("^/(.+)$", (ROOT / "docs/index.md").read_text(encoding="utf-8"), re.MULTILINE)
include_patterns = [f"{page}.*" for page in (root_doc, *pages)]
exclude_patterns = [".*", "runs", "data", "build", "conf", "**/*.csv"]

html_theme = "furo"
html_title = "FIRE"
html_favicon = "site/favicon.svg"
html_extra_path = ["site/index.html"]  # leads to docs/index.html
html_static_path = ["site"]
html_css_files = ["site.css"]
html_show_sourcelink = html_copy_source = html_show_copyright = False

myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are committed with their outputs

autodoc_member_order = "bysource"
autodoc_mock_imports = ["lightning", "transformers"]
default_role = "code"
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True


def edit_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Links to folders become plain text."""

    def plain(link: re.Match[str]) -> str:
        return link[1] if ((ROOT / name).parent / link[2]).is_dir() else link[0]

    if name.endswith("README") or "/" not in name:
        source[0] = FOLDER_LINK.sub(plain, source[0])


def edit_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """`Returns: ...` and `Raises: UserError ...`, with text in the same line, become the sections that napoleon reads.
    Lines that continue the text are joined to it."""

    def section(match: re.Match[str]) -> str:
        error = "UserError: " if match[1] == "Raises" else ""
        return f"\n{match[1]}:\n    {error}{' '.join(match[2].split())}"

    lines[:] = SECTION.sub(section, "\n".join(lines)).split("\n")


def setup(app: Sphinx) -> None:
    app.connect("source-read", edit_page)
    app.connect("autodoc-process-docstring", edit_docstring, priority=400)  # before napoleon
