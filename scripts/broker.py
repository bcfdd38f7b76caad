#!/usr/bin/env python3
"""A private RabbitMQ node, with its own ports, data, user, cookie and epmd.

    python scripts/broker.py start [--dir .run/broker]    # prints the AMQP URL
    python scripts/broker.py stop [--dir .run/broker]

    node = Node.start(Path("/tmp/rabbit"))
    node.add_vhost("mine"); node.amqp_url("mine"); node.kill(); node.start_again(); node.stop()

The suite, the demo and the benchmarks use it. The node writes only below its directory and does not
touch a system-wide RabbitMQ, its configuration or its epmd.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import bootstrap  # noqa: F401 - an old Python runs this file again by a newer one

import apt_install
from machine import HOST, Process, ScriptError, exit_with, free_ports, port_is_free, run, wait_until

MINIMUM_VERSION = (3, 10)
DOCKER_IMAGE = os.environ.get("RABBITMQ_IMAGE", "rabbitmq:4-management")
USER = "events"
START_TIMEOUT = 90.0
STOP_TIMEOUT = 20.0
REMEDY = (
    "Install RabbitMQ 3.10 or newer (on Debian and Ubuntu: apt install rabbitmq-server), start "
    "Docker, or set AMQP_URL (and AMQP_MANAGEMENT_URL) to a broker that tests may use."
)


class BrokerError(ScriptError):
    """RabbitMQ is missing, does not start, or refuses a request."""


def find_server() -> Path | None:
    """Return the directory of RabbitMQ's scripts, or None to run it in Docker.

    Installs RabbitMQ with apt if the machine has neither.

    Raises:
        BrokerError: there is no RabbitMQ; the message names the remedies.
    """
    if (scripts := _find_scripts()) is not None:
        return scripts
    if _docker_answers():
        return None
    try:
        apt_install.install(
            ["rabbitmq-server"],
            why="Tests and demo need RabbitMQ, and this machine has none",
            units=["rabbitmq-server.service", "epmd.service", "epmd.socket"],
            stray=["epmd"],
        )
    except ScriptError as exc:
        raise BrokerError(f"This machine has no RabbitMQ and no Docker. {exc}\n{REMEDY}") from exc
    if (scripts := _find_scripts()) is None:
        raise BrokerError(f"apt's rabbitmq-server has no server scripts. {REMEDY}")
    return scripts


def _find_scripts() -> Path | None:
    """Debian's /usr/sbin/rabbitmq-server is a wrapper that changes the user and goes to
    /var/lib/rabbitmq; the real scripts have `rabbitmq-env` beside them."""
    candidates = [Path("/usr/lib/rabbitmq/bin")]
    if on_path := shutil.which("rabbitmq-server"):
        candidates.insert(0, Path(on_path).resolve().parent)
    return next((each for each in candidates if (each / "rabbitmq-env").exists()), None)


def _docker_answers() -> bool:
    # Old clients exit with 0 although the daemon does not answer.
    with contextlib.suppress(ScriptError):
        return bool(run("docker", "info", "--format", "{{.ServerVersion}}", timeout=15).strip())
    return False


@dataclass(kw_only=True, eq=False)
class Broker:
    """A running RabbitMQ: the addresses of its vhosts, and its management API."""

    port: int
    management_port: int
    password: str
    user: str = USER
    host: str = HOST
    management_host: str = HOST

    @classmethod
    def from_urls(cls, amqp_url: str, management_url: str | None = None) -> Broker:
        """Return the broker at a URL; its management API is at port 15672 unless given."""
        amqp, management = urlsplit(amqp_url), urlsplit(management_url or "")
        return cls(
            host=amqp.hostname or HOST,
            port=amqp.port or 5672,
            user=unquote(amqp.username or "guest"),
            password=unquote(amqp.password or "guest"),
            management_host=management.hostname or amqp.hostname or HOST,
            management_port=management.port or 15672,
        )

    @property
    def _credentials(self) -> str:
        return f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"

    def amqp_url(self, vhost: str = "/") -> str:
        """Return the AMQP URL of a vhost, its name percent-encoded ("/" becomes %2F)."""
        return f"amqp://{self._credentials}@{self.host}:{self.port}/{quote(vhost, safe='')}"

    @property
    def management_url(self) -> str:
        """With user and password, as AMQP_EVENTS["MANAGEMENT_URL"] takes it."""
        return f"http://{self._credentials}@{self.management_host}:{self.management_port}"

    def http(self, method: str, path: str, body: Any = None, *, timeout: float = 30) -> Any:
        """Send a request to the management API; return the decoded answer, None if it is empty."""
        token = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        headers = {"Authorization": f"Basic {token}", "Content-Type": "application/json"}
        content = None if body is None else json.dumps(body)
        with contextlib.closing(
            http.client.HTTPConnection(self.management_host, self.management_port, timeout=timeout)
        ) as connection:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            answer = response.read()
        if response.status >= 300:
            raise BrokerError(
                f"{method} {path}: {response.status} {answer.decode('utf-8', 'replace')}"
            )
        return json.loads(answer) if answer else None

    def alarm(self) -> bool:
        """Return True while RabbitMQ accepts no messages because of its memory or its disk."""
        # A node that has just started reports no figures yet.
        alarms = ("mem_alarm", "disk_free_alarm")
        return any(node.get(alarm) for node in self.http("GET", "/api/nodes") for alarm in alarms)

    def add_vhost(self, name: str) -> None:
        """Create a vhost and give our user all permissions on it."""
        vhost = quote(name, safe="")
        self.http("PUT", f"/api/vhosts/{vhost}", {})
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        self.http("PUT", f"/api/permissions/{vhost}/{quote(self.user, safe='')}", everything)

    def delete_vhost(self, name: str) -> None:
        self.http("DELETE", f"/api/vhosts/{quote(name, safe='')}")


#: RabbitMQ's plugins that a node needs; libraries have other names.
PLUGINS = ("rabbitmq_management", "rabbitmq_prelaunch", "rabbitmq_web_dispatch")
#: The ports of a node, as attributes.
PORTS = ("port", "management_port", "distribution_port", "epmd_port")


@dataclass(kw_only=True, eq=False)
class Node(Broker):
    """A RabbitMQ node of our own: `Node.start` starts one, `Node.attach` finds one again.

    Attributes:
        scripts: directory of RabbitMQ's programs; None if it runs in Docker.
        epmd_port: of Erlang's port mapper, which the nodes of a cluster share.
        cookie: Erlang's cookie of the cluster that the node has joined; None if it is alone.
        owner: the pid with which the node ends; None if it outlives this process.
    """

    directory: Path
    scripts: Path | None
    distribution_port: int
    epmd_port: int
    nodename: str
    config_extra: str
    cookie: str | None
    owner: int | None
    version: str = ""
    _vm: Process | None = field(default=None, init=False)
    _guard: Process | None = field(default=None, init=False)

    # -- start and stop

    @classmethod
    def start(
        cls,
        directory: Path | str,
        *,
        config_extra: str = "",
        die_with_parent: bool = True,
        owner: int | None = None,
        peer: Node | None = None,
    ) -> Node:
        """Start a node in a new directory, or in that of a stopped node; wait until it is ready.

        Args:
            config_extra: lines for rabbitmq.conf, for instance "consumer_timeout = 5000" (ms).
            die_with_parent: a guard process ends the node when this process dies, even by SIGKILL.
            owner: pid of the process that the guard watches instead of this one.
            peer: a node whose cluster a new node joins.
        """
        directory = Path(directory).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        scripts = find_server()
        old = cls._read(directory)
        if old is not None:
            if old.alive:
                raise BrokerError(
                    f"A node runs in {directory} already (pid {old.pid}). "
                    "Stop it, or use another directory."
                )
            old._clean_up()
        known = old or peer  # an old data directory, or the cluster, has the user already
        ports = {name: getattr(old, name) for name in PORTS} if old else {}
        if not ports or not all(map(port_is_free, ports.values())):
            ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        if peer is not None:
            ports["epmd_port"] = peer.epmd_port
        node = cls(
            directory=directory,
            scripts=scripts,
            **ports,
            password=known.password if known else secrets.token_hex(12),
            # Two nodes with one epmd need different names.
            nodename=old.nodename if old else f"events{ports['port']}@localhost",
            config_extra=config_extra,
            cookie=peer.erlang_cookie if peer else None,
            owner=(owner or os.getpid()) if die_with_parent else None,
        )
        node.start_again()
        if peer is not None:
            node.stop_app()
            node.ctl("join_cluster", peer.nodename)
            node.start_app()
        return node

    @classmethod
    def attach(cls, directory: Path | str) -> Node | None:
        """Return the running node of a directory, or None."""
        node = cls._read(Path(directory).resolve())
        return node if node is not None and node.alive else None

    @property
    def pid(self) -> int | None:
        """The pid of the Erlang VM, or of Docker's client; None if it does not run."""
        return self._vm.pid if self._vm is not None and self._vm.alive else None

    @property
    def alive(self) -> bool:
        return self.pid is not None

    @property
    def processes(self) -> list[Process]:
        return [each for each in (self._vm, self._guard) if each is not None]

    def stop(self, *, timeout: float = STOP_TIMEOUT) -> None:
        """Stop gracefully; kill after *timeout* seconds. A second call does nothing."""
        if self._vm is not None and self.alive:
            self._vm.send(signal.SIGTERM)
            if not self._vm.wait(timeout):
                self.kill(at_once=True)
        self._clean_up()

    def kill(self, *, at_once: bool = False) -> None:
        """Kill RabbitMQ with SIGKILL, like a power cut. `start_again` brings it back.

        Unless *at_once*, wait for quorum queues declared a moment ago: RabbitMQ writes their names
        to disk a second later, and one that is killed earlier comes back with a dead queue.
        """
        if self._vm is None or not self.alive:
            return
        if not at_once:
            with contextlib.suppress(BrokerError, OSError, http.client.HTTPException):
                wait_until(self._queues_on_disk, 5)
        if self.scripts is None:
            with contextlib.suppress(ScriptError):
                run("docker", "kill", self._container)
        self._vm.send(signal.SIGKILL)
        if not self._vm.wait(15):
            raise BrokerError(f"RabbitMQ (pid {self._vm.pid}) survives SIGKILL.")

    def end(self) -> None:
        """Kill the node and its helpers: the quick end without the data."""
        with contextlib.suppress(BrokerError):
            self.kill(at_once=True)
        self._clean_up()

    def sync(self) -> None:
        """Write declarations to disk: Mnesia's log follows two seconds later (4.2+: no Mnesia)."""
        with contextlib.suppress(BrokerError):
            self.ctl("eval", "mnesia:sync_log().")

    def disown(self) -> None:
        """Let the node outlive this process; another process attaches to it and ends it."""
        for process in self.processes:
            process.release()

    def start_again(self) -> None:
        """Start with the same data and ports after `stop` or `kill`; wait until it is ready."""
        if self.alive:
            raise BrokerError(f"The node runs already (pid {self.pid}).")
        wait_until(lambda: port_is_free(self.port), 10)
        try:
            self._launch()
        except BaseException:
            self.end()
            raise

    def stop_app(self) -> None:
        """Stop RabbitMQ inside the running Erlang VM: listeners and connections close."""
        self.ctl("stop_app")

    def start_app(self) -> None:
        self.ctl("start_app")
        self.wait_ready()

    @property
    def erlang_cookie(self) -> str:
        return (self.directory / "home" / ".erlang.cookie").read_text()

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until AMQP and the management API answer.

        Raises:
            BrokerError: the node ended or is not ready in time; the message has the log's end.
        """
        if not wait_until(lambda: not self.alive or self._ready(), timeout):
            raise BrokerError(f"RabbitMQ is not ready after {timeout:.0f} s.\n{self._log_tail()}")
        if not self.alive:
            raise BrokerError(f"RabbitMQ ended while starting.\n{self._log_tail()}")

    def _ready(self) -> bool:
        with contextlib.suppress(OSError, BrokerError, http.client.HTTPException):
            overview = self.http("GET", "/api/overview", timeout=5)
            self.version = overview["rabbitmq_version"]
            # AMQP's listener starts last.
            return any(each["port"] == self.port for each in overview["listeners"])
        return False

    def ctl(self, *args: str, timeout: float = 60) -> str:
        """Run rabbitmqctl on this node and return its output. Takes about a second."""
        command = self._command("rabbitmqctl", "--quiet", "--node", self.nodename, *args)
        try:
            return run(*command, **self._surroundings, timeout=timeout)
        except ScriptError as exc:
            raise BrokerError(str(exc)) from None

    # -- processes

    def _launch(self) -> None:
        self._write_files()
        log = self.directory / "log"
        if self.owner is not None and (self._guard is None or not self._guard.alive):
            # Not PR_SET_PDEATHSIG: it fires when the starting *thread* ends, and not in Docker.
            guard = (sys.executable, "-E", "-s", "-S", Path(__file__).resolve(), "_guard")
            self._guard = Process.spawn(
                *guard, str(self.owner), self.directory, output=log / "guard.log"
            )
        if self.scripts is not None:
            # Erlang's own way to start it may end after this node, and leave it behind.
            self._epmd("-daemon", "-address", HOST)
        self._vm = Process.spawn(
            *self._command("rabbitmq-server"), output=log / "console.log", **self._surroundings
        )
        self._write_state()  # from here on the guard knows what to end
        self.wait_ready()
        if tuple(map(int, re.findall(r"\d+", self.version)[:2])) < MINIMUM_VERSION:
            raise BrokerError(f"RabbitMQ {self.version} is older than 3.10. {REMEDY}")
        self._write_state()

    def _epmd(self, *arguments: str) -> None:
        run("epmd", "-port", str(self.epmd_port), *arguments, **self._surroundings)

    def _epmd_ends(self) -> bool:
        # It refuses while a node of the cluster is registered.
        with contextlib.suppress(ScriptError):
            self._epmd("-kill")
        return port_is_free(self.epmd_port)

    def _clean_up(self) -> None:
        """End the helpers of a node that has ended."""
        if self.scripts is None:
            with contextlib.suppress(ScriptError):
                run("docker", "rm", "--force", "--volumes", self._container)
        else:
            wait_until(self._epmd_ends, 1)
        if self._guard is not None:
            self._guard.end()
        self._guard = None

    def _command(self, program: str, *arguments: str) -> list[str]:
        """Return a command line of RabbitMQ, which Docker's client runs in the container."""
        if self.scripts is not None:
            return [str(self.scripts / program), *arguments]
        if program != "rabbitmq-server":
            return ["docker", "exec", self._container, program, *arguments]
        # The host's network: the listeners are on its loopback, as without a container.
        command = ["docker", "run", "--rm", "--network", "host", "--name", self._container]
        command += ["--user", f"{os.getuid()}:{os.getgid()}"]
        command += ["--volume", f"{self.directory}:{self.directory}"]
        for key, value in self._environment().items():
            if key.startswith(("RABBITMQ_", "ERL_")) or key in {"HOME", "LANG"}:
                command += ["--env", f"{key}={value}"]
        return [*command, DOCKER_IMAGE, program]

    @property
    def _container(self) -> str:
        return f"django-amqp-events-{self.port}"

    @property
    def _surroundings(self) -> dict[str, Any]:
        """Directory and environment of RabbitMQ's programs. Docker's client keeps the caller's."""
        return {"cwd": self.directory, "env": self._environment() if self.scripts else None}

    def _environment(self) -> dict[str, str]:
        where = self.directory
        # Nothing of the caller's RABBITMQ_*, ERL_* reaches the node.
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_"))}
        if self.scripts is not None:
            env["RABBITMQ_PLUGINS_DIR"] = str(where / "plugins")
        return env | {
            "PATH": f"{env.get('PATH', '')}:/usr/bin:/usr/local/bin:/usr/lib/erlang/bin",
            "HOME": str(where / "home"),  # .erlang.cookie
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_CRASH_DUMP_SECONDS": "0",
            "RABBITMQ_NODENAME": self.nodename,
            "RABBITMQ_DIST_PORT": str(self.distribution_port),
            "RABBITMQ_CONF_ENV_FILE": str(where / "rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(where / "rabbitmq.conf"),
            "RABBITMQ_CONFIG_FILES": str(where / "conf.d"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(where / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(where / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(where / "data"),
            "RABBITMQ_LOG_BASE": str(where / "log"),
            # The script becomes the Erlang VM, so its pid is the VM's. It leaves out -noinput then.
            "RABBITMQ_ALLOW_INPUT": "1",
            # Two schedulers start a third faster than one per core of a large machine.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-noinput +S 2:2 +SDcpu 1:1 +SDio 4 -kernel inet_dist_use_interface {127,0,0,1}"
            ),
            "RABBITMQ_CTL_ERL_ARGS": "+S 1:1 +SDio 1 -kernel inet_dist_use_interface {127,0,0,1}",
        }

    # -- files

    def _write_files(self) -> None:
        for name in ("home", "data", "log", "conf.d"):
            (self.directory / name).mkdir(exist_ok=True)
        if self.scripts is not None:
            self._link_plugins((self.scripts / "rabbitmq-env").resolve().parents[1] / "plugins")
        cookie = self.directory / "home" / ".erlang.cookie"
        if not cookie.exists():
            cookie.touch(mode=0o600)
            cookie.write_text(self.cookie or secrets.token_hex(16))
            cookie.chmod(0o400)
        # Quorum queues report their depth on a tick of their own, and the management plugin reads
        # at the interval of its finest samples (seconds); both are 5 s by default. A dead letter
        # without a confirm, as of a queue that is not started yet, waits for three minutes (ms).
        samples = "[{global, [{60, 1}]}, {basic, [{60, 1}]}, {detailed, [{60, 1}]}]"
        for name, text in {
            "rabbitmq-env.conf": "",
            "enabled_plugins": "[rabbitmq_management].\n",
            "advanced.config": "[{rabbit, [{quorum_tick_interval, 500},\n"
            "  {dead_letter_worker_publisher_confirm_timeout, 5000}]},\n"
            f" {{rabbitmq_management, [{{sample_retention_policies, {samples}}}]}}].\n",
            "rabbitmq.conf": f"""\
listeners.tcp.1 = {HOST}:{self.port}
management.tcp.ip = {HOST}
management.tcp.port = {self.management_port}
default_user = {USER}
default_pass = {self.password}
default_user_tags.administrator = true
loopback_users = none
log.file = node.log
log.file.level = info
log.console = false
collect_statistics_interval = 500
disk_free_limit.absolute = 64MB
{self.config_extra}
""",
        }.items():
            _write_private(self.directory / name, text)

    def _link_plugins(self, source: Path) -> None:
        """Offer the management plugin alone: RabbitMQ reads all that it finds when it starts."""
        offered = self.directory / "plugins"
        offered.mkdir(exist_ok=True)
        for plugin in source.iterdir():
            other = plugin.name.startswith("rabbitmq_") and not plugin.name.startswith(PLUGINS)
            if not other and not (offered / plugin.name).is_symlink():
                (offered / plugin.name).symlink_to(plugin)

    def _write_state(self) -> None:
        state = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        state["processes"] = [each.identity for each in self.processes]
        partial = self.directory / "node.tmp"
        _write_private(partial, json.dumps(state, indent=2, default=str))
        partial.replace(self.directory / "node.json")

    @classmethod
    def _read(cls, directory: Path) -> Node | None:
        """Return the node of a directory, running or not; None if there was none."""
        try:
            state = json.loads((directory / "node.json").read_text())
            vm, *guard = (Process(**each) for each in state.pop("processes"))
            scripts = Path(state["scripts"]) if state["scripts"] else None
            node = cls(**state | {"directory": directory, "scripts": scripts, "owner": None})
            node._vm, node._guard = vm, guard[0] if guard else None
        except (OSError, ValueError, LookupError, TypeError):  # of another version of this file
            return None
        return node

    def _queues_on_disk(self) -> bool:
        """Return True if Raft's register of names, if there is one, has every quorum queue."""
        registers = list((self.directory / "data").glob("*/quorum/*/names.dets"))
        names = b"".join(register.read_bytes() for register in registers)
        queues = self.http("GET", "/api/queues?columns=name,vhost,type", timeout=5)
        return not registers or all(
            f"{queue['vhost'].replace('/', '%2F', queue['vhost'] == '/')}_{queue['name']}".encode()
            in names
            for queue in queues
            if queue.get("type") == "quorum" and (queue["vhost"] + queue["name"]).isascii()
        )

    def _log_tail(self, lines: int = 25) -> str:
        text = ""
        for name in ("console.log", "node.log"):
            with contextlib.suppress(OSError):
                content = (self.directory / "log" / name).read_text(errors="replace")
                text += f"--- {name}\n" + "\n".join(content.splitlines()[-lines:]) + "\n"
        return text


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


# -- command line


def _guard(owner: int, directory: Path) -> int:
    """Wait until the owner is gone, then end the node of the directory."""
    parent = Process.of(owner)
    while parent.alive:
        time.sleep(0.25)
    node = Node._read(directory)
    if node is not None and node._guard is not None and node._guard.pid == os.getpid():
        node._guard = None
        node.end()
    return 0


def main() -> int:
    if sys.argv[1:2] == ["_guard"]:
        return _guard(int(sys.argv[2]), Path(sys.argv[3]))
    parser = argparse.ArgumentParser(description="A private RabbitMQ node, in the background.")
    parser.add_argument("action", choices=["start", "stop"])
    parser.add_argument("--dir", type=Path, default=Path(".run/broker"), help="its directory")
    options = parser.parse_args()
    if options.action == "stop":
        if node := Node._read(options.dir.resolve()):
            node.stop()
        return 0
    node = Node.attach(options.dir)
    if node is None:
        node = Node.start(options.dir, die_with_parent=False)
        node.disown()
    print(f"RabbitMQ {node.version}, pid {node.pid}")
    print(f"broker      {node.amqp_url()}")
    print(f"management  {node.management_url}")
    return 0


if __name__ == "__main__":
    exit_with(main)
