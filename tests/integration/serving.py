"""The admin behind a real web server, and browsers for it."""

from __future__ import annotations

import http.cookiejar
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import django_amqp_events
from machine import free_ports
from tests import forked
from tests.unit.admin.admin_world import Page

from .wire import until

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = Path(django_amqp_events.__file__).resolve().parent.parent


@contextmanager
def serving(database: dict[str, object], url: str, tmp_path: Path) -> Iterator[tuple[str, UUID]]:
    """The admin in two processes of 25 threads each; yields its address and the event's id."""
    (port,) = free_ports(1)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(PACKAGE)]),
        "DATABASE": json.dumps(database),
        "URL": url,
    }
    made = forked.run(
        [sys.executable, "-m", "tests.integration.admin_web"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    command = [sys.executable, "-m", "gunicorn", "--workers", "2", "--worker-class", "gthread"]
    command += ["--threads", "25", "--bind", f"127.0.0.1:{port}", "--no-control-socket"]
    with (tmp_path / "log").open("wb") as log:
        server = forked.Popen(
            [*command, "tests.integration.admin_web:wsgi"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        until(lambda: answers(address) or server.poll() is not None, "gunicorn listens", 90)
        yield address, UUID(made.stdout.strip())
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def answers(address: str) -> bool:
    try:
        Browser(address).open("/admin/login/")
    except OSError:
        return False
    return True


class Browser:
    """Cookies, forms and redirects."""

    def __init__(self, address: str, cookies: http.cookiejar.CookieJar | None = None) -> None:
        self.address = address
        #: The path that the last answer is of, after redirects.
        self.last = ""
        self.cookies = http.cookiejar.CookieJar()
        for cookie in cookies or ():
            self.cookies.set_cookie(cookie)
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))

    def open(self, path: str, form: dict[str, str] | None = None) -> Page:
        data = urlencode(form).encode() if form is not None else None
        with self._opener.open(f"{self.address}{path}", data, timeout=60) as answer:
            self.last = answer.url.removeprefix(self.address).partition("?")[0]
            return Page(answer.read().decode())

    def login(self, name: str) -> Browser:
        form = self.open("/admin/login/").fields
        self.open("/admin/login/", {**form, "username": name, "password": "secret"})
        return self

    def again(self) -> Browser:
        """Another tab of the same person."""
        return Browser(self.address, self.cookies)


def more(database: dict[str, Any], url: str, number: int) -> None:
    """Put events into the database of a web server: with the first one that many, in a group."""
    code = (
        "from tests.integration import admin_web\n"
        "from tests.unit.admin import admin_world\n"
        "from django_amqp_events.archive.groups import failure_groups\n"
        f"for n in range(2, {number} + 1): admin_world.make(event_id=f'order-{{n}}')\n"
        "failure_groups.rebuild()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DATABASE": json.dumps(database), "URL": url}
    forked.run([sys.executable, "-c", code], cwd=ROOT, env=environ, check=True)
