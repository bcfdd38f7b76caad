"""The files in deploy/, as their own tools read them, and the processes that they start."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from machine import run
from tests.environments import environment

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))

_TO_JSON = "import json, sys, yaml; json.dump(list(yaml.safe_load_all(sys.stdin)), sys.stdout)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A process as compose, Kubernetes or systemd starts it.

    Attributes:
        command: its words; empty for the image's own.
        environment: variables, with the values that the files give.
        probes: commands that check its health, and HTTP requests as Kubernetes describes them.
        grace: seconds between SIGTERM and SIGKILL.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    probes: list[Any] = field(default_factory=list)
    grace: float = 10.0

    @property
    def manage(self) -> Iterator[list[str]]:
        """The arguments of each `manage.py` in its command and probes."""
        for words in (self.command, *(each for each in self.probes if isinstance(each, list))):
            for line in words[-1].split("&&") if words[:2] == ["sh", "-c"] else [shlex.join(words)]:
                program, *arguments = shlex.split(line)
                if Path(program).name == "python" and arguments[:1] == ["manage.py"]:
                    yield arguments[1:]


def tools() -> Path:
    """Return the folder of the programs in requirements/deploy.txt."""
    return environment("deploy") / "bin"


def read_yaml(text: str) -> list[Any]:
    """Return the documents of a YAML text."""
    command = [str(tools() / "python"), "-c", _TO_JSON]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    documents: list[Any] = json.loads(done.stdout)
    return documents


@cache
def compose() -> dict[str, Any]:
    """Return the project of compose.yaml, with the variables of env.example."""
    files = ("--env-file", DEPLOY / "env.example", "--file", DEPLOY / "compose.yaml")
    text = run(tools() / "docker-compose", *files, "config", "--format", "json")
    project: dict[str, Any] = json.loads(text.replace("$$", "$"))
    return project


@cache
def resources() -> list[dict[str, Any]]:
    """Return the resources of kubernetes/."""
    return read_yaml("---\n".join(path.read_text() for path in MANIFESTS))


def pod(resource: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the specification of the pods that a resource starts."""
    spec = resource.get("spec", {})
    found: dict[str, Any] = spec.get("jobTemplate", {}).get("spec", spec).get("template", {})
    return found.get("spec")


@cache
def image() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines())
            if name]  # fmt: skip


def image_default(instruction: str) -> list[str]:
    """Return the words of CMD, or of the command of HEALTHCHECK."""
    (text,) = (rest for name, rest in image() if name == instruction)
    words: list[str] = json.loads(text[text.index("[") :])
    return words


def image_environment() -> dict[str, str]:
    return dict(
        pair.split("=", 1) for name, rest in image() if name == "ENV" for pair in shlex.split(rest)
    )


def composed() -> list[Container]:
    """Return the containers of compose.yaml that run the image, each after those it waits for."""
    found: list[Container] = []
    waiting = {name: each for name, each in compose()["services"].items() if "build" in each}
    while waiting:
        for name, each in list(waiting.items()):
            if waiting.keys() & each["depends_on"].keys():
                continue
            check = each.get("healthcheck", {})
            probes = [] if check.get("disable") else [
                check["test"][1:] if check else image_default("HEALTHCHECK")
            ]  # fmt: skip
            command = each["command"] or image_default("CMD")
            found.append(
                Container(
                    name=name,
                    command=command,
                    environment=image_environment() | each["environment"],
                    probes=probes,
                    grace=_seconds(each.get("stop_grace_period", "10s")),
                )
            )
            del waiting[name]
    return found


def deployed() -> list[Container]:
    """Return the containers of kubernetes/, those of the set-up first."""
    data: dict[str, str] = {}
    for each in resources():
        if each["kind"] == "ConfigMap":
            data |= each["data"]
    found = []
    for each in sorted(resources(), key=lambda each: str(each["kind"] != "Job")):
        if (spec := pod(each)) is None:
            continue
        for one in (*spec.get("initContainers", ()), *spec["containers"]):
            probes = [probe for key, probe in one.items() if key.endswith("Probe")]
            own = {variable["name"]: variable["value"] for variable in one.get("env", ())}
            found.append(
                Container(
                    name=f"{each['metadata']['name']}.{one['name']}",
                    command=one.get("command") or image_default("CMD"),
                    environment=image_environment() | data | own,
                    probes=[p["exec"]["command"] if "exec" in p else p["httpGet"] for p in probes],
                    grace=spec.get("terminationGracePeriodSeconds", 30),
                )
            )
    return found


def unit(path: Path) -> dict[str, str]:
    """Return the last value of each key of a systemd unit."""
    pairs = (line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
    return {key: value for key, value in pairs if not key.startswith("#")}


def supervised() -> list[Container]:
    """Return the services of systemd/."""
    found = []
    for path in UNITS:
        if path.suffix == ".service":
            keys = unit(path)
            settings = {"DJANGO_SETTINGS_MODULE": "example_project.shop"}
            words = shlex.split(keys["ExecStart"])
            grace = _seconds(keys["TimeoutStopSec"])
            found.append(
                Container(name=path.stem, command=words, environment=settings, grace=grace)
            )
    return found


def _seconds(text: str) -> float:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(count) * units[name] for count, name in re.findall(r"([\d.]+)([hms])", text))
