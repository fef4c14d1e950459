"""Settings of Sphinx. The site shows the repository's own Markdown files and notebooks, in their own folders.

So a relative link works on the site as it does in a checkout, and nothing is written twice.
"""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from fire_core.methods import table

ROOT = Path(__file__).parents[1]
FOLDERS = {  # caption in the sidebar: folder and pages
    "Library": ("docs/concepts", "targets solvers report optimizer triggers methods architectures"),
    "How-to": (
        "docs/how-to",
        "try_before_you_treat continual reinforcement_learning any_method parallel lightning transformers "
        "phase_boundaries checkpoints batch_norm dormant_units add_a_method run_a_campaign",
    ),
    "API": ("docs/api", "fire targets methods triggers measure integrations checkpoints"),
    "Experiments": (
        ".",
        "README vision/README language/README rl/dqn/README rl/sac/README docs/concepts/statistics "
        "docs/concepts/reliability rl/dqn/settings_tried rl/speed analysis/README CONTRIBUTING CHANGELOG",
    ),
    "Results": (
        ".",
        "docs/findings docs/studies docs/explore REPRODUCED docs/DEVIATIONS docs/FIDELITY analysis/paper/README "
        "tests/official/README",
    ),
    "Notebooks": (
        "analysis/notebooks",
        "fire_in_five_minutes try_before_you_treat figure_2 figure_3 figure_4 figure_5 failures",
    ),
}
CONTENTS = {
    caption: [(Path(folder) / page).as_posix() for page in pages.split()]
    for caption, (folder, pages) in FOLDERS.items()
}
CONTENTS["Library"].insert(0, "fire_core/README")
FOLDER_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:]+)\)")
# up to a blank line or the start of the next section
SECTION = re.compile(r"^(Returns|Raises): +(?:UserError\b)?(.*(?:\n(?!\s*$|[A-Z]\w*:).*)*)", re.MULTILINE)

project = "FIRE"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [f"{page}.*" for page in [root_doc, *(p for pages in CONTENTS.values() for p in pages)]]
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
    """Links to folders become plain text, and the first page gets the table of contents that only the site needs."""
    folder = (ROOT / name).parent

    def plain(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    if name.endswith("README") or "/" not in name:
        source[0] = FOLDER_LINK.sub(plain, source[0])
    if name == "docs/concepts/methods":
        source[0] = source[0].replace("<!-- methods -->", table())
    if name == root_doc:
        source[0] += "".join(contents(pages, caption) for caption, pages in CONTENTS.items())


def contents(pages: list[str], caption: str) -> str:
    """A hidden table of contents: its pages, given from the root, appear in the sidebar."""
    listed = "\n".join(f"/{page}" for page in pages)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


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
