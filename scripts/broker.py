#!/usr/bin/env python3
"""A private RabbitMQ node: ports, data, user, cookie and epmd of its own.

For the test suite and the demo. Uses nothing but the standard library, so that it runs before
anything is installed::

    python scripts/broker.py start --dir .run/broker     # prints the AMQP URL
    python scripts/broker.py status --dir .run/broker
    python scripts/broker.py stop --dir .run/broker

    node = Node.start(Path("/tmp/rabbit"))
    node.add_vhost("mine"); node.amqp_url("mine"); node.kill(); node.start_again(); node.stop()

Everything that the node writes lies below its directory. A system-wide RabbitMQ, its data, its
configuration and its epmd are neither read nor touched.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import apt_install  # a sibling: scripts/ is no package, so that each of them runs on its own

HOST = "127.0.0.1"
MINIMUM_VERSION = (3, 10)
DOCKER_IMAGE = os.environ.get("RABBITMQ_IMAGE", "rabbitmq:4-management")
START_TIMEOUT = 90.0
STOP_TIMEOUT = 20.0

REMEDY = (
    "Remedies: install RabbitMQ 3.10 or newer (on Debian and Ubuntu: apt install rabbitmq-server), "
    "or start Docker, or set AMQP_URL (and AMQP_MANAGEMENT_URL) to a broker that tests may use."
)


class BrokerError(RuntimeError):
    """The node could not be found, started or driven; the message says what to do about it."""


# -- where a server comes from ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A RabbitMQ server that can be started: scripts on this machine, or a Docker image."""

    kind: str  # "scripts" or "docker"
    location: str  # directory of the scripts, or name of the image
    origin: str = "found"

    @property
    def version(self) -> str | None:
        """What the installation calls itself; None where only the running node knows."""
        if self.kind != "scripts":
            return None
        match = re.search(r"rabbitmq_server-(\d+(?:\.\d+)+)", str(Path(self.location).resolve()))
        if match is None:  # Debian's directory holds links into the versioned one
            target = (Path(self.location) / "rabbitmq-server").resolve()
            match = re.search(r"rabbitmq_server-(\d+(?:\.\d+)+)", str(target))
        return match.group(1) if match else None


def find_server(*, install: bool = True) -> Server:
    """The first that works: scripts on this machine, Docker, installation by apt.

    Raises BrokerError, naming the remedies, where nothing works.
    """
    found = _find_scripts()
    reasons = []
    if found is not None:
        if _version_tuple(found.version) >= MINIMUM_VERSION or found.version is None:
            return found
        reasons.append(f"RabbitMQ {found.version} in {found.location} is older than 3.10")
    docker = _find_docker()
    if docker is not None:
        return docker
    reasons.append("no Docker daemon answers")
    if install and found is None:
        try:
            apt_install.install(
                ["rabbitmq-server"],
                why="no RabbitMQ was found on this machine, and the tests and the demo need one",
                services=["rabbitmq-server.service", "epmd.service", "epmd.socket"],
                stray=["epmd"],
            )
        except apt_install.AptError as exc:
            reasons.append(str(exc))
        else:
            found = _find_scripts()
            if found is not None and _version_tuple(found.version) >= MINIMUM_VERSION:
                return Server(kind=found.kind, location=found.location, origin="installed by apt")
            reasons.append(
                f"apt's RabbitMQ is {found.version}, older than 3.10"
                if found
                else "apt's package has no server scripts"
            )
    elif found is None:
        reasons.insert(0, "no rabbitmq-server on this machine")
    raise BrokerError("No usable RabbitMQ: " + "; ".join(reasons) + ". " + REMEDY)


def _find_scripts() -> Server | None:
    """The real scripts. Debian's /usr/sbin/rabbitmq-server is a wrapper that changes the user and
    goes to /var/lib/rabbitmq; the real ones have `rabbitmq-env` beside them."""
    candidates: list[Path] = []
    if home := os.environ.get("RABBITMQ_SERVER_HOME"):
        candidates += [Path(home) / "sbin", Path(home)]
    if on_path := shutil.which("rabbitmq-server"):
        candidates.append(Path(on_path).resolve().parent)
    candidates.append(Path("/usr/lib/rabbitmq/bin"))
    for root in (
        "/usr/lib/rabbitmq/lib",
        "/opt",
        "/usr/local/opt/rabbitmq",
        "/opt/homebrew/opt/rabbitmq",
    ):
        base = Path(root)
        candidates += sorted(base.glob("rabbitmq_server-*/sbin"), reverse=True) + [base / "sbin"]
    for candidate in candidates:
        if (candidate / "rabbitmq-server").exists() and (candidate / "rabbitmq-env").exists():
            return Server(kind="scripts", location=str(candidate))
    return None


def _find_docker() -> Server | None:
    """Docker counts only where its daemon answers."""
    if shutil.which("docker") is None:
        return None
    try:
        done = subprocess.run(
            ["docker", "info", "--format", "{{.ServerVersion}}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=15,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # Old clients exit with 0 although the daemon is away; an answer is what counts.
    if done.returncode != 0 or not done.stdout.strip():
        return None
    return Server(kind="docker", location=DOCKER_IMAGE)


def _version_tuple(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version or "")[:3])


# -- small tools --------------------------------------------------------------------------------


def _ephemeral_floor() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def free_ports(count: int) -> list[int]:
    """Free loopback ports below the ephemeral range.

    Not `bind(0)`: while the node is down, a client that tries to reconnect could be given an
    ephemeral port as its own source port, connect to itself, and keep the node from coming back.
    """
    top = max(min(_ephemeral_floor(), 60000), 12000)
    rng = random.SystemRandom()
    ports: list[int] = []
    for _ in range(2000):
        port = rng.randrange(10240, top)
        if port in ports or not _port_is_free(port):
            continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise BrokerError("No free loopback ports below the ephemeral range.")


def _port_is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def process_birth(pid: int) -> str | None:
    """When the process started, in the kernel's ticks; None where no such process runs.

    A pid alone is no identity: it is given out again. A zombie counts as dead once its threads,
    and with them its sockets, are gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:  # no /proc (macOS): the pid has to do
            os.kill(pid, 0)
        except OSError:
            return None
        return "unknown"
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        with contextlib.suppress(OSError):
            return fields[19] if len(list(Path(f"/proc/{pid}/task").iterdir())) > 1 else None
        return None
    return fields[19]


@dataclass(slots=True)
class Process:
    """A process by pid and birth, ours or another's child; signals never reach a stranger."""

    pid: int
    birth: str
    child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, child: subprocess.Popen[bytes]) -> Process:
        return cls(pid=child.pid, birth=process_birth(child.pid) or "gone", child=child)

    @property
    def alive(self) -> bool:
        if self.child is not None:  # asking also collects it
            return self.child.poll() is None
        return process_birth(self.pid) == self.birth

    def release(self) -> None:
        """No longer ours to collect: Python would complain that it outlives us."""
        if self.child is not None:
            self.child.returncode = 0
            self.child = None

    def send(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float) -> bool:
        """True when the process ended within the time (seconds)."""
        return wait_until(lambda: not self.alive, timeout, interval=0.02)

    def end(self, timeout: float = 5.0) -> None:
        self.send(signal.SIGTERM)
        if not self.wait(timeout):
            self.send(signal.SIGKILL)
            self.wait(10)


def wait_until(condition: Callable[[], bool], timeout: float, *, interval: float = 0.05) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def _spawn(command: Sequence[str], *, env: Mapping[str, str], cwd: Path, output: Path) -> Process:
    """Start a command in a session of its own, so that a terminal's Ctrl-C does not reach it."""
    with output.open("ab") as log:
        child = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Process.of(child)


# -- the node -----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Ports:
    """Loopback ports of one node."""

    amqp: int
    management: int
    distribution: int
    epmd: int

    @classmethod
    def pick(cls, epmd: int | None = None) -> Ports:
        """Choose ports that are free now; the nodes of a cluster have one epmd."""
        amqp, management, distribution, own = free_ports(4)
        return cls(amqp=amqp, management=management, distribution=distribution, epmd=epmd or own)

    def taken(self, *, without_epmd: bool = False) -> list[int]:
        ports = asdict(self)
        if without_epmd:
            del ports["epmd"]
        return [port for port in ports.values() if not _port_is_free(port)]


class Broker:
    """A RabbitMQ that answers somewhere: addresses of its vhosts, and its management API."""

    def __init__(
        self, *, host: str, port: int, user: str, password: str, management_port: int | None
    ) -> None:
        self.host = host
        self.port = port
        self.user = user
        self.password = password
        self.management_port = management_port

    @classmethod
    def from_urls(cls, amqp_url: str, management_url: str | None = None) -> Broker:
        """A broker that somebody else runs. Without a management URL: the same host, port 15672."""
        amqp = urllib.parse.urlsplit(amqp_url)
        management = urllib.parse.urlsplit(management_url or "")
        broker = cls(
            host=amqp.hostname or HOST,
            port=amqp.port or 5672,
            user=urllib.parse.unquote(amqp.username or "guest"),
            password=urllib.parse.unquote(amqp.password or "guest"),
            management_port=management.port or 15672,
        )
        broker.management_host = management.hostname or broker.host
        return broker

    management_host = ""

    @property
    def _credentials(self) -> str:
        return (
            f"{urllib.parse.quote(self.user, safe='')}:{urllib.parse.quote(self.password, safe='')}"
        )

    def amqp_url(self, vhost: str = "/") -> str:
        """The AMQP URL of a vhost, its name percent-encoded ("/" becomes %2F)."""
        path = urllib.parse.quote(vhost, safe="")
        return f"amqp://{self._credentials}@{self.host}:{self.port}/{path}"

    @property
    def management_url(self) -> str | None:
        """With user and password in it, as AMQP_EVENTS["MANAGEMENT_URL"] takes it."""
        if self.management_port is None:
            return None
        return (
            f"http://{self._credentials}@{self.management_host or self.host}:{self.management_port}"
        )

    def http(self, method: str, path: str, body: Any = None, *, timeout: float = 30) -> Any:
        """One request to the management API; the decoded answer, None where it is empty."""
        if self.management_port is None:
            raise BrokerError("This node was started without the management plugin.")
        token = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        connection = http.client.HTTPConnection(
            self.management_host or self.host, self.management_port, timeout=timeout
        )
        try:
            connection.request(
                method,
                path,
                body=None if body is None else json.dumps(body),
                headers={"Authorization": f"Basic {token}", "Content-Type": "application/json"},
            )
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status >= 300:
            raise BrokerError(
                f"{method} {path}: {response.status} {content.decode(errors='replace')}"
            )
        return json.loads(content) if content else None

    def add_vhost(self, name: str) -> None:
        """A vhost on which our user may do everything."""
        vhost = urllib.parse.quote(name, safe="")
        self.http("PUT", f"/api/vhosts/{vhost}", {})
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        self.http(
            "PUT", f"/api/permissions/{vhost}/{urllib.parse.quote(self.user, safe='')}", everything
        )

    def delete_vhost(self, name: str) -> None:
        self.http("DELETE", f"/api/vhosts/{urllib.parse.quote(name, safe='')}")


class Node(Broker):
    """One RabbitMQ node, started by `Node.start` or found again by `Node.attach`."""

    def __init__(
        self,
        directory: Path,
        server: Server,
        *,
        ports: Ports,
        user: str,
        password: str,
        management: bool,
        config_extra: str,
        owner: int | None,
        nodename: str = "events@localhost",
        cookie: str | None = None,
    ) -> None:
        super().__init__(
            host=HOST,
            port=ports.amqp,
            user=user,
            password=password,
            management_port=ports.management if management else None,
        )
        self.directory = directory
        self.server = server
        self.ports = ports
        self.management = management
        self.config_extra = config_extra
        self.owner = owner
        self.nodename = nodename
        self.cookie = cookie
        self.version = server.version or ""
        self._vm: Process | None = None
        self._epmd: Process | None = None
        self._guard: Process | None = None

    # -- life

    @classmethod
    def start(
        cls,
        directory: Path | str,
        *,
        management: bool = True,
        ports: Ports | None = None,
        config_extra: str | None = None,
        server: Server | None = None,
        die_with_parent: bool = True,
        owner: int | None = None,
        peer: Node | None = None,
    ) -> Node:
        """Start a node on a directory, new or left by a stopped node, and wait until it is ready.

        With `peer` a new node becomes a member of that node's cluster.

        `config_extra` is added to rabbitmq.conf, for instance "consumer_timeout = 5000" (its unit
        is the millisecond). With `die_with_parent` a guard process ends the node when this process,
        or the one whose pid is `owner`, is gone, however it went.
        """
        directory = Path(directory).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        before = _read_state(directory)
        if before is not None:
            running = cls._from_state(directory, before)
            if running.alive:
                raise BrokerError(
                    f"A node runs in {directory} already (pid {running.pid}): "
                    "stop it, or use another directory."
                )
            running._clean_up()
        server = server or find_server()
        if peer is not None and (server.kind == "docker" or before is not None):
            raise BrokerError("Only a new node that is no container can join a cluster.")
        chosen = ports or (Ports(**before["ports"]) if before else None)
        attempts = 1 if ports else 4
        for attempt in range(attempts):
            if chosen is None or (ports is None and (attempt or chosen.taken())):
                chosen = Ports.pick(peer.ports.epmd if peer else None)
            node = cls(
                directory,
                server,
                ports=chosen,
                user="events",
                # The user is made with the data directory: an old directory knows the old password.
                password=before["password"]
                if before
                else peer.password
                if peer
                else secrets.token_hex(12),
                management=management,
                config_extra=(before["config_extra"] if before else "")
                if config_extra is None
                else config_extra,
                owner=(owner or os.getpid()) if die_with_parent else None,
                **(
                    # An Erlang node's name cannot be used twice on one epmd.
                    {"nodename": f"events{chosen.amqp}@localhost", "cookie": peer.erlang_cookie}
                    if peer
                    else {}
                ),
            )
            try:
                node._launch()
                if peer is not None:
                    node._join(peer)
                return node
            except BrokerError:
                node._end_everything()
                if attempt + 1 == attempts or not chosen.taken(without_epmd=peer is not None):
                    raise
            except BaseException:
                node._end_everything()
                raise
        raise AssertionError("unreachable")

    @classmethod
    def attach(cls, directory: Path | str) -> Node | None:
        """The running node of a directory; None where none runs (a stale state file is no node)."""
        directory = Path(directory).resolve()
        state = _read_state(directory)
        if state is None:
            return None
        node = cls._from_state(directory, state)
        return node if node.alive else None

    @property
    def pid(self) -> int | None:
        """Of the Erlang VM (with Docker: as the host sees it); None while it does not run."""
        return self._vm.pid if self._vm is not None and self._vm.alive else None

    @property
    def alive(self) -> bool:
        return self.pid is not None

    def stop(self, *, timeout: float = STOP_TIMEOUT) -> None:
        """Stop gracefully, kill after `timeout` seconds. May be called twice."""
        if self._vm is not None and self._vm.alive:
            if self.server.kind == "docker":
                self._docker("stop", "--time", str(int(timeout)), self._container, check=False)
                self._vm.wait(timeout)
            else:
                self._vm.send(signal.SIGTERM)
            if not self._vm.wait(timeout):
                self.kill(at_once=True)
        self._clean_up()

    def kill(self, *, at_once: bool = False) -> None:
        """End the Erlang VM with SIGKILL, as a power cut would. `start_again` brings it back.

        Waits before, unless `at_once`, for quorum queues declared a moment ago: RabbitMQ writes
        their names to disk with a second's delay, and one that is killed earlier comes back with
        a queue that answers nobody.
        """
        if not at_once and self.alive:
            with contextlib.suppress(BrokerError, OSError, http.client.HTTPException):
                wait_until(self._queues_on_disk, 5)
        if self._vm is not None:
            if self.server.kind == "docker":
                self._docker("kill", "--signal", "KILL", self._container, check=False)
            else:
                self._vm.send(signal.SIGKILL)
            if not self._vm.wait(15):
                raise BrokerError(f"RabbitMQ (pid {self._vm.pid}) survives SIGKILL.")

    def sync(self) -> None:
        """Have what was declared on disk: Mnesia's log is written with two seconds' delay.

        From RabbitMQ 4.2 on there may be no Mnesia, and nothing to wait for.
        """
        with contextlib.suppress(BrokerError):
            self.ctl("eval", "mnesia:sync_log().")

    def disown(self) -> None:
        """Let it run on without this process: somebody else attaches to it and ends it."""
        for process in (self._vm, self._epmd, self._guard):
            if process is not None:
                process.release()

    def _queues_on_disk(self) -> bool:
        """Whether Raft's register of names holds every quorum queue (True where nobody can say)."""
        registers = list((self.directory / "data").glob("*/quorum/*/names.dets"))
        if not self.management or not registers:
            return True
        names = b"".join(register.read_bytes() for register in registers)
        queues = self.http("GET", "/api/queues?columns=name,vhost,type", timeout=5)
        return all(
            f"{queue['vhost'].replace('/', '%2F', queue['vhost'] == '/')}_{queue['name']}".encode()
            in names
            for queue in queues
            if queue.get("type") == "quorum" and (queue["vhost"] + queue["name"]).isascii()
        )

    def end(self) -> None:
        """Kill it and what belongs to it: the quick end of a node whose data nobody needs."""
        self._end_everything()

    def start_again(self) -> None:
        """Start on the same data and ports after `stop` or `kill`, and wait until it is ready."""
        if self.alive:
            raise BrokerError(f"The node runs already (pid {self.pid}).")
        wait_until(lambda: self.ports.amqp not in self.ports.taken(), 10)
        try:
            self._launch()
        except BaseException:
            self._end_everything()
            raise

    def stop_app(self) -> None:
        """Stop RabbitMQ inside the running Erlang VM: listeners and connections are gone."""
        self.ctl("stop_app")

    def start_app(self) -> None:
        self.ctl("start_app")
        self.wait_ready()

    @property
    def erlang_cookie(self) -> str:
        return (self.directory / "home" / ".erlang.cookie").read_text()

    def _join(self, peer: Node) -> None:
        """Become a member of another node's cluster, with its users and vhosts."""
        self.ctl("stop_app")
        self.ctl("join_cluster", peer.nodename)
        self.ctl("start_app")
        self.wait_ready()

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Return when AMQP and management answer; BrokerError with the end of the log otherwise."""
        deadline = time.monotonic() + timeout
        reason = ""
        while True:
            if not self.alive:
                raise BrokerError(f"RabbitMQ ended while starting.\n{self._log_tail()}")
            try:
                self.version = _amqp_greeting(self.ports.amqp)
                if self.management:
                    self.http("GET", "/api/overview", timeout=5)
                return
            except (OSError, BrokerError, http.client.HTTPException) as exc:
                reason = str(exc)
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"RabbitMQ is not ready after {timeout:.0f} s ({reason}).\n{self._log_tail()}"
                )
            time.sleep(0.05)

    def _launch(self) -> None:
        self._write_files()
        if self.owner is not None and (self._guard is None or not self._guard.alive):
            # Not PR_SET_PDEATHSIG: it fires when the starting *thread* ends, and knows no Docker.
            self._guard = _spawn(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(Path(__file__).resolve()),
                    "_guard",
                    str(self.owner),
                    str(self.directory),
                ],
                env=os.environ,
                cwd=self.directory,
                output=self.directory / "log" / "guard.log",
            )
        if self.server.kind == "docker":
            self._launch_docker()
        else:
            self._launch_scripts()
        self._write_state()  # from here on the guard knows what to end
        self.wait_ready()
        if _version_tuple(self.version) < MINIMUM_VERSION:
            raise BrokerError(f"RabbitMQ {self.version} is older than 3.10. {REMEDY}")
        self._enable_feature_flags()
        self._write_state()

    def _launch_scripts(self) -> None:
        env = self._environment()
        if (self._epmd is None or not self._epmd.alive) and self.cookie is None:
            epmd = shutil.which("epmd", path=env["PATH"])
            if epmd is None:
                raise BrokerError(f"Erlang's epmd is not on the PATH. {REMEDY}")
            self._epmd = _spawn(
                [epmd, "-port", str(self.ports.epmd), "-address", HOST],
                env=env,
                cwd=self.directory,
                output=self.directory / "log" / "epmd.log",
            )
            epmd_process = self._epmd
            wait_until(
                lambda: not epmd_process.alive or _epmd_answers(self.ports.epmd), 10, interval=0.01
            )
            if not epmd_process.alive:
                raise BrokerError(f"The node's epmd did not start on port {self.ports.epmd}.")
        # ALLOW_INPUT makes the script become the Erlang VM (no shell stays in front of it, so the
        # pid is the VM's); -noinput, which the script then leaves out, is in the arguments.
        self._vm = _spawn(
            [str(Path(self.server.location) / "rabbitmq-server")],
            env=env,
            cwd=self.directory,
            output=self.directory / "log" / "console.log",
        )

    def _clean_up(self) -> None:
        """After the VM has ended: the rest that belongs to it."""
        if self.server.kind == "docker":
            self._docker("rm", "--force", "--volumes", self._container, check=False)
        if self._guard is not None:
            self._guard.end()
            self._guard = None
        if self._epmd is not None:
            self._epmd.end()
            self._epmd = None
        with contextlib.suppress(FileNotFoundError):
            (self.directory / "pid").unlink()

    def _end_everything(self) -> None:
        with contextlib.suppress(BrokerError):
            self.kill(at_once=True)
        self._clean_up()

    # -- files

    def _environment(self) -> dict[str, str]:
        where = self.directory
        # Nothing of the caller's RABBITMQ_*, ERL_* reaches the node.
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_", "ERTS_"))
        }
        path = os.pathsep.join(
            [env.get("PATH", ""), "/usr/bin", "/usr/local/bin", "/usr/lib/erlang/bin"]
        )
        return env | {
            "PATH": path,
            "HOME": str(where / "home"),  # .erlang.cookie
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(self.ports.epmd),
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_CRASH_DUMP_SECONDS": "0",
            "RABBITMQ_NODENAME": self.nodename,
            "RABBITMQ_DIST_PORT": str(self.ports.distribution),
            "RABBITMQ_CONF_ENV_FILE": str(where / "rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(where / "rabbitmq.conf"),
            "RABBITMQ_CONFIG_FILES": str(where / "conf.d"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(where / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(where / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(where / "data"),
            "RABBITMQ_LOG_BASE": str(where / "log"),
            "RABBITMQ_PID_FILE": str(where / "pid"),
            "RABBITMQ_ALLOW_INPUT": "1",
            # Two schedulers start a third faster than one per core of a large machine.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-noinput +S 2:2 +SDcpu 1:1 +SDio 4 -kernel inet_dist_use_interface {127,0,0,1}"
            ),
            "RABBITMQ_CTL_ERL_ARGS": "+S 1:1 +SDio 1 -kernel inet_dist_use_interface {127,0,0,1}",
        }

    def _write_files(self) -> None:
        for name in ("home", "data", "log", "conf.d"):
            (self.directory / name).mkdir(exist_ok=True)
        cookie = self.directory / "home" / ".erlang.cookie"
        if not cookie.exists():
            cookie.touch(mode=0o600)
            cookie.write_text(self.cookie or secrets.token_hex(16))
            cookie.chmod(0o400)
        listen = "0.0.0.0" if self.server.kind == "docker" else HOST  # noqa: S104 (inside the container)
        plugins = "rabbitmq_management" if self.management else ""
        (self.directory / "rabbitmq-env.conf").write_text("")
        (self.directory / "enabled_plugins").write_text(f"[{plugins}].\n")
        lines = [
            f"listeners.tcp.1 = {listen}:{self.ports.amqp}",
            f"default_user = {self.user}",
            f"default_pass = {self.password}",
            "default_user_tags.administrator = true",
            "loopback_users = none",
            "log.file = node.log",
            "log.file.level = info",
            "log.console = false",
            "collect_statistics_interval = 500",
            "disk_free_limit.absolute = 64MB",
        ]
        if self.management:
            lines += [
                f"management.tcp.ip = {listen}",
                f"management.tcp.port = {self.ports.management}",
            ]
        (self.directory / "rabbitmq.conf").write_text("\n".join([*lines, self.config_extra, ""]))
        # Quorum queues report their depth on a tick of their own, and management's collector reads
        # at the interval of its finest samples (seconds); both are 5 s by default.
        samples = "[{global, [{60, 1}]}, {basic, [{60, 1}]}, {detailed, [{60, 1}]}]"
        (self.directory / "advanced.config").write_text(
            f"[{{rabbit, [{{quorum_tick_interval, 500}}]}},\n"
            f" {{rabbitmq_management, [{{sample_retention_policies, {samples}}}]}}].\n"
        )
        (self.directory / "rabbitmq.conf").chmod(0o600)

    @property
    def state_file(self) -> Path:
        return self.directory / "node.json"

    def _write_state(self) -> None:
        def process(item: Process | None) -> dict[str, Any] | None:
            return {"pid": item.pid, "birth": item.birth} if item is not None else None

        state = {
            "pid": self._vm.pid if self._vm else None,
            "url": self.amqp_url(),
            "management_url": self.management_url,
            "version": self.version,
            "server": asdict(self.server),
            "ports": asdict(self.ports),
            "user": self.user,
            "password": self.password,
            "management": self.management,
            "config_extra": self.config_extra,
            "nodename": self.nodename,
            "cookie": self.cookie,
            "vm": process(self._vm),
            "epmd": process(self._epmd),
            "guard": process(self._guard),
        }
        partial = self.state_file.with_suffix(".tmp")
        partial.touch(mode=0o600)
        partial.write_text(json.dumps(state, indent=2))
        partial.replace(self.state_file)

    @classmethod
    def _from_state(cls, directory: Path, state: dict[str, Any]) -> Node:
        node = cls(
            directory,
            Server(**state["server"]),
            ports=Ports(**state["ports"]),
            user=state["user"],
            password=state["password"],
            management=state["management"],
            config_extra=state["config_extra"],
            owner=None,
            nodename=state.get("nodename", "events@localhost"),
            cookie=state.get("cookie"),
        )
        node.version = state["version"]
        node._vm = Process(**state["vm"]) if state["vm"] else None
        node._epmd = Process(**state["epmd"]) if state["epmd"] else None
        node._guard = Process(**state["guard"]) if state["guard"] else None
        return node

    def _log_tail(self, lines: int = 25) -> str:
        text = ""
        for name in ("console.log", "node.log"):
            with contextlib.suppress(OSError):
                content = (self.directory / "log" / name).read_text(errors="replace")
                text += f"--- {name}\n" + "\n".join(content.splitlines()[-lines:]) + "\n"
        return text

    # -- driving it

    def ctl(self, *args: str, timeout: float = 60) -> str:
        """Run rabbitmqctl against this node and return what it prints. Takes about a second."""
        command = ["--quiet", "--node", self.nodename, *args]
        if self.server.kind == "docker":
            return self._docker("exec", self._container, "rabbitmqctl", *command)
        done = subprocess.run(
            [str(Path(self.server.location) / "rabbitmqctl"), *command],
            env=self._environment(),
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise BrokerError(
                f"rabbitmqctl {' '.join(args)} ended with {done.returncode}: "
                f"{done.stdout}{done.stderr}"
            )
        return done.stdout

    def add_vhost(self, name: str) -> None:
        if self.management:
            super().add_vhost(name)
        else:
            self.ctl("add_vhost", name)
            self.ctl("set_permissions", "--vhost", name, self.user, ".*", ".*", ".*")

    def delete_vhost(self, name: str) -> None:
        if self.management:
            super().delete_vhost(name)
        else:
            self.ctl("delete_vhost", name)

    def feature_flags(self) -> dict[str, str]:
        """Name and state ("enabled", "disabled", "unavailable") of each."""
        if self.management:
            return {flag["name"]: flag["state"] for flag in self.http("GET", "/api/feature-flags")}
        listed = self.ctl("list_feature_flags", "name", "state", "--formatter", "json")
        return {flag["name"]: flag["state"] for flag in json.loads(listed)}

    def _enable_feature_flags(self) -> None:
        """A fresh node has every stable flag; a data directory of an older release may not."""
        if not self.management:
            self.ctl("enable_feature_flag", "all")
            return
        flags = self.http("GET", "/api/feature-flags")
        wanted = [
            f
            for f in flags
            if f["state"] == "disabled" and f.get("stability", "stable") == "stable"
        ]
        for flag in wanted:
            name = urllib.parse.quote(flag["name"], safe="")
            self.http("PUT", f"/api/feature-flags/{name}/enable", {"name": flag["name"]})
        states = self.feature_flags()
        missing = [
            name
            for name in ("quorum_queue", "stream_queue")
            if states.get(name, "enabled") != "enabled"
        ]
        if missing:
            raise BrokerError(
                f"RabbitMQ {self.version} did not enable the feature flags {', '.join(missing)}."
            )

    # -- Docker

    @property
    def _container(self) -> str:
        return f"django-amqp-events-{self.ports.amqp}"

    def _docker(self, *args: str, check: bool = True) -> str:
        done = subprocess.run(
            ["docker", *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if check and done.returncode != 0:
            raise BrokerError(f"docker {' '.join(args[:2])} failed: {done.stderr.strip()}")
        return done.stdout

    def _launch_docker(self) -> None:
        """The same files and environment in a container; ports keep their numbers."""
        if self._docker("ps", "--all", "--quiet", "--filter", f"name=^{self._container}$").strip():
            self._docker("start", self._container)
        else:
            env = {
                k: v
                for k, v in self._environment().items()
                if k.startswith(("RABBITMQ_", "ERL_"))
                and k not in {"RABBITMQ_ALLOW_INPUT", "ERL_EPMD_ADDRESS"}
            }
            env["RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"] = "+S 2:2"
            env["HOME"] = str(self.directory / "home")
            options = [arg for key, value in env.items() for arg in ("--env", f"{key}={value}")]
            for port in {self.ports.amqp, self.ports.management}:
                options += ["--publish", f"{HOST}:{port}:{port}"]
            self._docker(
                "run",
                "--detach",
                "--name",
                self._container,
                "--user",
                f"{os.getuid()}:{os.getgid()}",
                "--volume",
                f"{self.directory}:{self.directory}",
                *options,
                self.server.location,
                "rabbitmq-server",
            )
        pid = int(
            self._docker("inspect", "--format", "{{.State.Pid}}", self._container).strip() or 0
        )
        birth = process_birth(pid) if pid else None
        if birth is None:
            raise BrokerError(
                f"The container {self._container} ended.\n" + self._docker("logs", self._container)
            )
        self._vm = Process(pid=pid, birth=birth)


def _read_state(directory: Path) -> dict[str, Any] | None:
    try:
        state = json.loads((directory / "node.json").read_text())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _epmd_answers(port: int) -> bool:
    """Whether an epmd listens there: asked for the names it knows, it begins with its port."""
    try:
        with socket.create_connection((HOST, port), timeout=1) as sock:
            sock.sendall(b"\x00\x01n")
            return sock.recv(4) == port.to_bytes(4, "big")
    except OSError:
        return False


def _amqp_greeting(port: int) -> str:
    """The version from the server's Connection.Start; OSError while nothing answers."""
    with socket.create_connection((HOST, port), timeout=5) as sock:
        sock.sendall(b"AMQP\x00\x00\x09\x01")
        received = b""
        while (
            b"\x07versionS" not in received or len(received) < received.index(b"\x07versionS") + 16
        ):
            chunk = sock.recv(4096)
            if not chunk:
                raise OSError("the connection was closed before the server's greeting")
            received += chunk
    start = received.index(b"\x07versionS") + 9
    size = int.from_bytes(received[start : start + 4], "big")
    return received[start + 4 : start + 4 + size].decode()


# -- command line -------------------------------------------------------------------------------


@contextlib.contextmanager
def _interrupted_by(*numbers: int) -> Iterator[Callable[[], bool]]:
    seen: list[int] = []
    before = {number: signal.signal(number, lambda n, _frame: seen.append(n)) for number in numbers}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _guard(owner: int, directory: Path) -> int:
    """Wait until the owner is gone, then end the node of the directory."""
    born = process_birth(owner)
    while born is not None and process_birth(owner) == born:
        time.sleep(0.25)
    state = _read_state(directory)
    if state is not None and state["guard"] is not None and state["guard"]["pid"] == os.getpid():
        node = Node._from_state(directory, state | {"guard": None})
        node._end_everything()
    return 0


def _describe(node: Node) -> str:
    lines = [f"RabbitMQ {node.version}, pid {node.pid}", f"broker      {node.amqp_url()}"]
    if node.management_url:
        lines.append(f"management  {node.management_url}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["_guard"]:
        return _guard(int(argv[1]), Path(argv[2]))

    parser = argparse.ArgumentParser(description="A private RabbitMQ node for tests and the demo.")
    parser.add_argument(
        "action",
        choices=["run", "start", "stop", "status"],
        help="run: in the foreground until Ctrl-C; start: in the background; "
        "stop: may be repeated; status: exit code 0 where a node runs, 3 otherwise",
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(".run/broker"), help="where everything of it lies"
    )
    parser.add_argument("--no-management", action="store_true", help="without the HTTP API")
    parser.add_argument("--json", action="store_true", help="print the state file")
    options = parser.parse_args(argv)

    try:
        node = Node.attach(options.dir)
        if options.action == "status":
            if node is None:
                print("no node runs in", options.dir)
                return 3
        elif options.action == "stop":
            if node is not None:
                node.stop()
            elif (state := _read_state(options.dir.resolve())) is not None:
                Node._from_state(options.dir.resolve(), state)._clean_up()
            return 0
        elif node is None:
            node = Node.start(
                options.dir,
                management=not options.no_management,
                die_with_parent=options.action == "run",
            )
            if options.action == "start":
                node.disown()
        print(node.state_file.read_text() if options.json else _describe(node), flush=True)
        if options.action == "run":
            with _interrupted_by(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupted:
                while node.alive and not interrupted():
                    time.sleep(0.2)
                ended_by_itself = not interrupted()
            node.stop()
            return 1 if ended_by_itself else 0
    except BrokerError as exc:
        print(f"broker: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
