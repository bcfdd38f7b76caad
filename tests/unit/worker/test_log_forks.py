"""A process that is forked while a thread writes to a log can log, too."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: A thread writes a line, which takes a while. Meanwhile the process forks, and the child logs.
#: It prints how the child ended.
PROGRAM = """
import io, logging, os, signal, sys, threading, time

class Slow(io.RawIOBase):
    def writable(self):
        return True

    def write(self, data):
        begun.set()
        time.sleep(0.5)
        return len(data)

begun = threading.Event()
log = logging.getLogger("shop.orders")
log.addHandler(logging.StreamHandler(io.TextIOWrapper(io.BufferedWriter(Slow()))))
if sys.argv[1] == "installed":
    from django_amqp_events.worker import log_forks
    log_forks.install()
threading.Thread(target=log.warning, args=("a line",)).start()
begun.wait()
child = os.fork()
if not child:
    signal.alarm(5)
    log.warning("a line of the child")
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
log.warning("the parent's log works")
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize(("how", "ended"), [("installed", "0"), ("plain", "-14")])
def test_a_forked_process_logs(how: str, ended: str) -> None:
    """Without it, the child waits for the stream's lock until SIGALRM ends it."""
    # Python 3.12 and newer warn of any fork in a process with threads, as Celery's is.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [ended], done.stderr
    assert not done.stderr
