"""How Sphinx makes the site; `make docs` runs it with warnings as errors."""

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

# Before anything imports transformers: the site is made without the network.
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import pages
from docutils import nodes
from sphinx.domains.python import PyXRefRole

project = "heapr-lab"
release = version = importlib.metadata.version(project)
author = "the authors of heapr-lab"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

# Links to headings have the names that GitHub gives them.
myst_heading_anchors = 3

# Notebooks are shown as they were committed, their widgets as the text beside them.
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, Any] = {}
suppress_warnings = ["mystnb.unknown_mime_type"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
add_module_names = False
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_dark_style = "a11y-dark"


class Name(PyXRefRole):
    """What docstrings put between single backticks: code, linked where it is here."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """A reference, or the text as it is."""
        if not self.text.isidentifier():
            return [nodes.literal(self.rawtext, self.text)], []
        self.name = "py:obj"
        return super().run()


default_role = "name"


def setup(app: Any) -> None:
    """Write what is made of the sources, before Sphinx looks what there is."""
    pages.write_pages(Path(app.srcdir))
    app.add_role(default_role, Name())
    app.connect("source-read", _link_pages)


def _link_pages(_app: Any, _name: str, source: list[str]) -> None:
    source[0] = pages.linked_pages(source[0])
