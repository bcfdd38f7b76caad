"""What is uploaded: the index shows it, the sdist installs into an empty environment; docs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import django_amqp_events
from machine import run
from tests.environments import environment

HERE = Path(__file__).resolve().parents[2]
#: `make test` runs in .run/suite of the project, without the package's folder.
SOURCE = HERE if (HERE / "django_amqp_events").exists() else HERE.parents[1]
SETTINGS = """\
SECRET_KEY = "x"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_amqp_events"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
AMQP_EVENTS = {"SERVICE": "shop", "CELERY_APP": "empty_celery.app"}
"""
CELERY = "import celery; app = celery.Celery('shop', broker='amqp://localhost')"

pytestmark = pytest.mark.timeout(600)  # environments are installed


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sdist and wheel."""
    folder = tmp_path_factory.mktemp("built") / "dist"
    run(sys.executable, SOURCE / "scripts" / "wheel.py", "--build", folder)
    assert sorted(path.suffix for path in folder.iterdir()) == [".gz", ".whl"]
    return folder


def test_the_index_accepts_and_shows_it(built: Path, tmp_path: Path) -> None:
    programs = environment("docs") / "bin"
    run(programs / "python", "-m", "twine", "check", "--strict", *built.iterdir())
    page = tmp_path / "readme.html"
    run(programs / "python", "-m", "readme_renderer", SOURCE / "README.md", "-o", page)
    links = re.findall(r'(?:href|src)="([^"]+)"', page.read_text())
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_sdist_installs_into_an_empty_environment(built: Path, tmp_path: Path) -> None:
    lock = (SOURCE / "requirements" / "dev.txt").read_text()
    versions = re.findall(r"^(\S+==\S+(?: ;.*?)?) \\$", lock, re.MULTILINE)
    (tmp_path / "constraints.txt").write_text("\n".join(versions))
    (tmp_path / "empty_settings.py").write_text(SETTINGS)
    (tmp_path / "empty_celery.py").write_text(CELERY)
    python = tmp_path / "venv" / "bin" / "python"
    (sdist,) = built.glob("*.tar.gz")
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DJ"))}
    env["DJANGO_SETTINGS_MODULE"] = "empty_settings"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(
        python, "-m", "pip", "install", "--constraint", tmp_path / "constraints.txt", sdist,
        env=env,
    )  # fmt: skip
    for command in (("migrate",), ("makemigrations", "--check"), ("events_prune", "--help")):
        run(python, "-m", "django", *command, cwd=tmp_path, env=env)


# -- docs/ as a site -------------------------------------------------------------------------------


#: What a page loads, as against what it links to.
LOADED = re.compile(
    r'<(?:script|img|link rel="(?:stylesheet|preload|icon)")[^>]*?(?:src|href)="([^"]+)'
)


def test_a_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """The site is built with the options of `make docs`, so that any warning is an error."""
    (command,) = re.findall(r"-m sphinx (.*)", (HERE / "Makefile").read_text())
    # The wheel without the packages beside it, which are those of another environment.
    path = tmp_path / "path"
    path.mkdir()
    (path / "django_amqp_events").symlink_to(Path(django_amqp_events.__file__).parent)
    options = command.replace(".run/docs", str(tmp_path)).split()
    python = environment("docs") / "bin" / "python"
    run(python, "-m", "sphinx", *options, cwd=HERE, env=os.environ | {"PYTHONPATH": str(path)})
    pages = list((tmp_path / "html").rglob("*.html"))
    assert len(pages) > len(list((HERE / "docs").rglob("*.md")))
    for page in pages:
        for source in LOADED.findall(page.read_text()):
            assert not source.startswith(("http:", "https:", "//")), f"{page.name}: {source}"
            assert (page.parent / source.partition("?")[0]).exists(), f"{page.name}: {source}"
