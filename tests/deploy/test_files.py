"""deploy/: each file is valid for its tool, and what it names exists in the project."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import apt_install
from machine import run

from .files import (
    DEPLOY,
    ROOT,
    Container,
    compose,
    composed,
    image,
    image_default,
    read_yaml,
    tools,
)

#: The first test installs the tools: 50 MB from PyPI, once for each .venv.
pytestmark = pytest.mark.timeout(300)

#: What libpq, Python and Django themselves read.
OTHERS = {"PGHOST", "PGUSER", "PGPASSWORD", "DJANGO_SETTINGS_MODULE", "PATH"} | {
    "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"
}  # fmt: skip
PARSE = """
import contextlib, io, json, sys
import django; django.setup()
from django.core.management import CommandError, get_commands, load_command_class
wrong = []
for name, *arguments in json.load(sys.stdin):
    said = io.StringIO()
    try:
        app = get_commands()[name]
        parser = load_command_class(app, name).create_parser("manage.py", name)
        with contextlib.redirect_stderr(said):
            parser.parse_args(arguments)
    except (CommandError, KeyError, SystemExit) as exc:
        wrong.append(f"{name} {arguments}: {exc!r} {said.getvalue()}")
json.dump(wrong, sys.stdout)
"""


def project(*arguments: str, settings: str = "shop", text: str = "", **env: str) -> str:
    """Run Python in the example project."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("AMQP_", "DJANGO_", "EXAMPLE_"))
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=kept | {"DJANGO_SETTINGS_MODULE": f"example_project.{settings}"} | env,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- each file is valid ---------------------------------------------------------------------------


def test_dockerfile() -> None:
    run(tools() / "hadolint", DEPLOY / "Dockerfile")
    assert all(rest.startswith("[") for name, rest in image() if name == "CMD"), "exec form"
    assert [rest.split(":")[0] for name, rest in image() if name == "USER"] == ["10001"]


def test_prometheus(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        apt_install.install(["prometheus"], why="promtool checks the configuration")
    service = compose()["services"]["prometheus"]
    for each in service["configs"]:
        target = tmp_path / each["target"].removeprefix("/etc/prometheus/")
        target.parent.mkdir(exist_ok=True)
        target.write_text(compose()["configs"][each["source"]]["content"])
    for each in service["volumes"]:
        if each["type"] == "bind":
            shutil.copy(each["source"], tmp_path / each["target"].removeprefix("/etc/prometheus/"))
    said = run("promtool", "check", "config", tmp_path / "prometheus.yml")
    assert "2 rule files found" in said
    (config,) = read_yaml((tmp_path / "prometheus.yml").read_text())
    scraped = {
        (name, one["port"])
        for job in config["scrape_configs"]
        for one in job.get("dns_sd_configs", ())
        for name in one["names"]
    }
    serving = {(each.name, int(port)) for each in composed() for port in metrics_port(each)}
    assert scraped == serving


def metrics_port(container: Container) -> list[str]:
    return re.findall(r"--metrics-port[= ](\d+)", " ".join(container.command))


def test_grafana() -> None:
    service = compose()["services"]["grafana"]
    contents = {
        each["target"]: read_yaml(compose()["configs"][each["source"]]["content"])[0]
        for each in service["configs"]
    }
    folder = "/etc/grafana/provisioning"
    (source,) = contents[f"{folder}/datasources/prometheus.yaml"]["datasources"]
    (provider,) = contents[f"{folder}/dashboards/events.yaml"]["providers"]
    (dashboard,) = (each for each in service["volumes"] if each["type"] == "bind")
    variables = json.loads(Path(dashboard["source"]).read_text())["templating"]["list"]
    assert source["type"] in {each["query"] for each in variables if each["type"] == "datasource"}
    assert source["url"] == "http://prometheus:9090"
    assert Path(dashboard["target"]).parent == Path(provider["options"]["path"])


# -- what they name exists ------------------------------------------------------------------------


def test_commands() -> None:
    """Each command line of `manage.py` is one that its command accepts."""
    lines = [words for each in composed() for words in each.manage]
    assert {"events_worker", "events_declare", "migrate"} <= {line[0] for line in lines}
    assert json.loads(project("-c", PARSE, text=json.dumps(lines))) == []
    wrong = [["events_worker", "--metric"], ["events_nothing"]]
    assert len(json.loads(project("-c", PARSE, text=json.dumps(wrong)))) == 2


def test_gunicorn() -> None:
    program, *arguments = image_default("CMD")
    assert program == "gunicorn"
    project("-m", "gunicorn", *arguments, "--check-config")


def read_by_the_settings() -> set[str]:
    """Return the environment variables that the example project reads."""
    text = "".join(
        (ROOT / "example_project" / f"{name}.py").read_text() for name in ("base", "wsgi")
    )
    return {
        node.value
        for node in ast.walk(ast.parse(text.replace("from __future__ import annotations", "")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"(AMQP|DJANGO|EXAMPLE)_[A-Z_]+", node.value)
    }


def test_environment() -> None:
    known = read_by_the_settings() | OTHERS
    for each in composed():
        assert each.environment.keys() <= known, each.name
    documented = (ROOT / "example_project" / "base.py").read_text()
    for name in read_by_the_settings() - OTHERS:
        assert re.search(rf"^{name} +\S", documented, re.MULTILINE), name


def test_ports() -> None:
    exposed = {int(port) for name, rest in image() if name == "EXPOSE" for port in rest.split()}
    bound = {int(port) for port in re.findall(r":(\d+)", " ".join(image_default("CMD")))}
    for each in composed():
        served = {*map(int, metrics_port(each))} | (bound if "gunicorn" in each.command else set())
        assert set(each.ports) <= served <= exposed, each.name
        for probe in each.probes:
            if isinstance(probe, list):
                asked = re.findall(r"'localhost', (\d+)", " ".join(probe))
                assert {int(port) for port in asked} <= served, each.name


def test_images_have_a_tag() -> None:
    images = [each["image"] for each in compose()["services"].values()]
    images += [rest.split()[0] for name, rest in image() if name == "FROM"]
    for name in images:
        assert re.search(r":v?\d[\w.-]*$", name), name
