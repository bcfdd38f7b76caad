"""How Sphinx builds these pages into a site: `make docs`."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import django
from django.conf import settings

ROOT = Path(__file__).resolve().parent.parent
# The suite puts the installed wheel on the path instead; there is no package beside docs/ then.
sys.path.append(str(ROOT))
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = METADATA["urls"]["Repository"]

# autodoc imports modules that import models.
settings.configure(
    INSTALLED_APPS=[
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django_amqp_events",
    ],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    AMQP_EVENTS={"SERVICE": "docs"},
)
django.setup()

project = "django_amqp_events"
author = METADATA["authors"][0]["name"]
copyright = author  # noqa: A001 (Sphinx's name)
release = METADATA["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["images", "metrics"]
myst_heading_anchors = 4
nitpicky = True
#: Signatures name private types and those of other packages, whose sites a build does not ask.
nitpick_ignore_regex = [
    ("py:class", ".*"),
    ("py:.*", r"(?!django_amqp_events\b).*"),
]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"AMQP events {release}"
html_copy_source = False
html_domain_indices = False
html_use_index = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
    "footer_icons": [],
}


def link_to_repository(_app: Any, name: str, source: list[str]) -> None:
    """Let links that leave docs/ lead to the repository: Sphinx knows the files in docs/ only."""
    up = re.escape("../" * (name.count("/") + 1))
    source[0] = re.sub(rf"\]\({up}([^)\s]*)\)", rf"]({REPOSITORY}/blob/main/\1)", source[0])


def copy_pictures(app: Any, error: Exception | None) -> None:
    """Copy the pictures of <picture> elements, which Sphinx does not read."""
    if error is None:
        shutil.copytree(ROOT / "docs" / "images", Path(app.outdir) / "images", dirs_exist_ok=True)


def setup(app: Any) -> None:
    app.connect("source-read", link_to_repository)
    app.connect("build-finished", copy_pictures)
