"""The programs of docs/other-programs.md, run against RabbitMQ and a worker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import npm

from ..conftest import Make
from ..harness import Eyes, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[3]
FOREIGN = ROOT / "tests" / "acceptance" / "foreign"
BLOCK = re.compile(r"^```(python|js)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = BLOCK.findall((ROOT / "docs" / "other-programs.md").read_text())
ENDINGS = {"python": "py", "js": "js"}


def command(language: str, program: Path) -> tuple[list[str], dict[str, str]]:
    """Return how a program is run, and what its environment has for it."""
    if language == "python":
        return [sys.executable, str(program)], {}
    modules = npm.install(FOREIGN, "the Node.js examples of docs/other-programs.md")
    return ["node", str(program)], {"NODE_PATH": str(modules)}


@contextmanager
def running(language: str, text: str, url: str, where: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a program of the page; kill it at the end."""
    program = where / f"program.{ENDINGS[language]}"
    program.write_text(text)
    words, environ = command(language, program)
    process = subprocess.Popen(
        words,
        env={**os.environ, "AMQP_URL": url, **environ},
        cwd=where,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_programs_in_other_languages_publish_events(
    fresh_eyes: Eyes, service: Make, tmp_path: Path
) -> None:
    core = service(fresh_eyes, handlers="foreign").declare()
    core.worker().wait_ready()
    publishers = [each for each in PROGRAMS if "consume" not in each[1]]
    assert [language for language, _ in publishers] == ["python", "js", "js"]
    for number, (language, text) in enumerate(publishers):
        where = tmp_path / str(number)
        where.mkdir()
        with running(language, text, fresh_eyes.url, where) as process:
            output = process.communicate(timeout=120)[0]
            assert process.returncode == 0, output

    def registered() -> list[dict[str, object]]:
        return core.ledger(what="registered")

    until(lambda: len(registered()) == len(publishers), 30, "each event is handled")
    by_order = {line["payload"]["order_id"]: line for line in registered()}  # type: ignore[index]
    assert sorted(by_order) == [1, 2, 4]
    sources = [by_order[order]["source"] for order in (1, 2, 4)]
    assert sources == ["pika-shop", "node-shop", "/node-shop"]
    assert by_order[2]["event"] == "order-2-created"
    assert by_order[4]["subject"] == "order 4"
    assert by_order[4]["content_type"] == "application/cloudevents+json"
    assert {line["payload"]["total"] for line in registered()} == {"9.90"}  # type: ignore[index]


def test_a_program_in_node_reads_every_format(
    fresh_eyes: Eyes, service: Make, tmp_path: Path
) -> None:
    core = service(fresh_eyes, handlers="foreign").declare()
    [(language, text)] = [each for each in PROGRAMS if "consume" in each[1]]
    with running(language, text, fresh_eyes.url, tmp_path) as process:
        until(lambda: fresh_eyes.declared("node-warehouse"), 60, "its queue is declared")
        until(lambda: fresh_eyes.consumers("node-warehouse"), 30, "it consumes")
        output = core.python(
            "from django.test import override_settings\n"
            "from django.conf import settings\n"
            "from django_amqp_events import publish_event\n"
            "for form in ('celery', 'cloudevents', 'json'):\n"
            "    with override_settings(AMQP_EVENTS={**settings.AMQP_EVENTS, 'FORMAT': form}):\n"
            "        print(publish_event('shop.order.created', {'form': form}))\n"
        )
        ids = output.split()
        assert process.stdout is not None
        read = [json.loads(process.stdout.readline()) for _ in ids]
    assert read == [
        {"id": event_id, "name": "shop.order.created", "payload": {"form": form}}
        for event_id, form in zip(ids, ("celery", "cloudevents", "json"), strict=True)
    ]
