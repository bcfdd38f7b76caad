"""A step that consumes queues of other programs: ``TESTPROJECT_STEP`` has its attributes.

A message's body has an id and a plan: one word per delivery, the last one for all after it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter

from celery.exceptions import Reject

from django_amqp_events.worker import AMQPConsumerStep, Received

from . import ledger
from .steps import wait_for_file

_deliveries: Counter[str] = Counter()
_lock = threading.Lock()


class Other(AMQPConsumerStep):
    """Consumes what other programs publish."""

    locals().update(json.loads(os.environ.get("TESTPROJECT_STEP", "{}")))

    def handle(self, message: Received) -> None:
        body = json.loads(message.body)
        with _lock:
            _deliveries[body["id"]] += 1
            number = _deliveries[body["id"]]
        line = {
            "event": body["id"],
            "queue": message.queue,
            "redelivered": message.redelivered,
            "thread": threading.current_thread().name,
        }
        ledger.write("start", **line)
        plan = body["plan"]
        word, _, argument = plan[min(number, len(plan)) - 1].partition(":")
        if word == "sleep":
            time.sleep(float(argument))
        elif word == "file":
            wait_for_file(argument)
        elif word == "fail":
            raise ValueError("no")
        elif word == "exit":
            sys.exit(3)
        elif word == "reject":
            raise Reject("not wanted", requeue=False)
        elif word == "requeue":
            raise Reject("not now", requeue=True)
        ledger.write("end", **line)
