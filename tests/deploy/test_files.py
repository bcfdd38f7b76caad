"""deploy/ and .github/: each file is valid for its tool, and what it names exists."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import apt_install
from machine import run
from tests.commands import run_example

from .files import (
    DEPLOY,
    MANIFESTS,
    ROOT,
    UNITS,
    Container,
    compose,
    composed,
    deployed,
    image,
    image_default,
    pod,
    read_yaml,
    resources,
    supervised,
    tools,
    unit,
)

#: The first test installs the tools: 50 MB from PyPI, once for each .venv.
pytestmark = pytest.mark.timeout(300)

#: What libpq, Python and Django themselves read.
OTHERS = {"PGHOST", "PGUSER", "PGPASSWORD", "DJANGO_SETTINGS_MODULE", "PATH"} | {
    "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PROMETHEUS_MULTIPROC_DIR"
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


def everything() -> list[Container]:
    return [*composed(), *deployed(), *supervised()]


# -- each file is valid ---------------------------------------------------------------------------


def test_dockerfile() -> None:
    run(tools() / "hadolint", DEPLOY / "Dockerfile")
    assert all(rest.startswith("[") for name, rest in image() if name == "CMD"), "exec form"
    assert [rest.split(":")[0] for name, rest in image() if name == "USER"] == ["10001"]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copied = {rest.split()[0] for name, rest in image() if name == "COPY"}
    assert {name for name in copied if not name.startswith("--from=")} == sent


def test_manifests() -> None:
    core = [path for path in MANIFESTS if path.name != "keda.yaml"]
    run(tools() / "kubernetes-validate", "--strict", *core)


KEDA = """
import json, sys
from cloudcoil.models.keda import v1alpha1
def unknown(data, model, path=""):
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(model, dict) or key not in model:
                yield f"{path}.{key}"
            else:
                yield from unknown(value, model[key], f"{path}.{key}")
    if isinstance(data, list):
        for number, (value, one) in enumerate(zip(data, model)):
            yield from unknown(value, one, f"{path}[{number}]")
for each in json.load(sys.stdin):
    model = getattr(v1alpha1, each["kind"]).model_validate(each)
    print(*unknown(each, model.model_dump(by_alias=True, exclude_unset=True)), sep="\\n", end="")
"""


def keda(*documents: dict[str, Any]) -> str:
    """Return what KEDA's own schema finds unknown."""
    command = [str(tools() / "python"), "-c", KEDA]
    text = json.dumps(documents)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_keda() -> None:
    found = [each for each in resources() if each["apiVersion"].startswith("keda.sh/")]
    assert {each["kind"] for each in found} == {"ScaledObject", "TriggerAuthentication"}
    assert keda(*found) == ""
    (scaled,) = (each for each in found if each["kind"] == "ScaledObject")
    assert keda({**scaled, "spec": {**scaled["spec"], "maxReplica": 1}}) == ".spec.maxReplica"


@pytest.mark.parametrize("name", ["release", "test"])
def test_each_workflow_runs_on_each_python(name: str) -> None:
    path = ROOT / ".github" / "workflows" / f"{name}.yml"
    run(tools() / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", path)
    (workflow,) = read_yaml(path.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == pythons


def test_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        apt_install.install(["systemd"], why="systemd-analyze checks the units")
    for path in UNITS:  # with a program and a folder that exist
        text = path.read_text().replace("/srv/shop/.venv/bin/python", sys.executable)
        (tmp_path / path.name).write_text(text.replace("/srv/shop", str(ROOT)))
    names = [tmp_path / path.name for path in UNITS]
    command = ["systemd-analyze", "verify", "--man=no", *map(str, names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""
    services = [name for name in names if name.suffix == ".service"]
    # 10 is a service that may do everything; 2 and less is "OK".
    run("systemd-analyze", "security", "--offline=true", "--threshold=20", *services)
    for path in UNITS:
        if path.suffix == ".service" and unit(path)["Type"] != "oneshot":
            assert unit(path)["KillMode"] == "mixed"
            assert unit(path)["OOMPolicy"] == "continue"


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


# -- what they name exists ------------------------------------------------------------------------


def test_commands() -> None:
    """Each command line of `manage.py` is one that its command accepts."""
    lines = [words for each in everything() for words in each.manage]
    assert {"events_worker", "events_declare", "migrate"} <= {line[0] for line in lines}
    for containers in (deployed(), supervised()):  # nothing else deletes old rows
        assert ["events_prune"] in [words for each in containers for words in each.manage]
    assert json.loads(run_example("-c", PARSE, text=json.dumps(lines))) == []
    wrong = [["events_worker", "--metric"], ["events_nothing"]]
    assert len(json.loads(run_example("-c", PARSE, text=json.dumps(wrong)))) == 2


def test_gunicorn() -> None:
    program, *arguments = image_default("CMD")
    assert program == "gunicorn"
    run_example("-m", "gunicorn", *arguments, "--check-config")


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
    for each in everything():
        assert each.environment.keys() <= known, each.name
        if metrics_port(each):
            assert "PROMETHEUS_MULTIPROC_DIR" in each.environment, each.name
    assert secret().keys() <= known
    documented = (ROOT / "example_project" / "base.py").read_text()
    for name in read_by_the_settings() - OTHERS:
        assert re.search(rf"^{name} +\S", documented, re.MULTILINE), name


def secret() -> dict[str, str]:
    """Return the Secret that docs/deployment.md creates."""
    text = (ROOT / "docs" / "deployment.md").read_text()
    return dict(re.findall(r"--from-literal=(\w+)='?([^'\s\\]+)", text))


def test_names_of_kubernetes() -> None:
    found = resources()
    by_kind: dict[str, dict[str, Any]] = {}
    for each in found:
        by_kind.setdefault(each["kind"], {})[each["metadata"]["name"]] = each
    deployments = by_kind["Deployment"]
    for name, each in deployments.items():
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert each["spec"]["selector"]["matchLabels"] == labels
        assert by_kind["PodDisruptionBudget"][name]["spec"]["selector"]["matchLabels"] == labels
        for one in each["spec"]["template"]["spec"].get("topologySpreadConstraints", ()):
            assert one["labelSelector"]["matchLabels"] == labels
        annotations = each["spec"]["template"]["metadata"].get("annotations", {})
        ports = [
            port["containerPort"]
            for port in each["spec"]["template"]["spec"]["containers"][0]["ports"]
        ]
        if "prometheus.io/port" in annotations:
            assert ports == [int(annotations["prometheus.io/port"])]
    web = deployments["shop-web"]["spec"]["template"]
    assert by_kind["Service"]["shop-web"]["spec"]["selector"] == web["metadata"]["labels"]
    for spec in filter(None, map(pod, found)):
        assert spec["securityContext"]["runAsNonRoot"]
        for one in (*spec.get("initContainers", ()), *spec["containers"]):
            names = {next(iter(ref.values()))["name"] for ref in one["envFrom"]}
            assert names == by_kind["ConfigMap"].keys() == {"shop"}
            assert one["securityContext"]["readOnlyRootFilesystem"]
    scaled = by_kind["ScaledObject"]["shop-worker"]["spec"]
    assert scaled["scaleTargetRef"]["name"] in deployments
    assert "replicas" not in deployments["shop-worker"]["spec"], "KEDA sets it"
    (key,) = by_kind["TriggerAuthentication"]["shop-rabbitmq"]["spec"]["secretTargetRef"]
    assert key["key"] in secret()


def test_scaling_counts_the_handlers_queues() -> None:
    """And neither delayed nor archived events, which no worker consumes."""
    (scaled,) = (each for each in resources() if each["kind"] == "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    # KEDA's schema has any text here; these are its documented names.
    known = {"protocol", "mode", "queueName", "useRegex", "operation", "value"}
    assert trigger["metadata"].keys() == known
    pattern = re.compile(trigger["metadata"]["queueName"])
    catalogue = json.loads(run_example("manage.py", "events_catalogue", "--format", "json"))
    handlers = {name for event in catalogue["events"] for name in event["handlers"]}
    assert len(handlers) >= 3
    assert all(pattern.search(f"shop.{name}") for name in handlers)
    for other in ("shop:delay.1s", "shop:archive", "shop:graveyard", "billing.x", "tasks-shop"):
        assert not pattern.search(other)
