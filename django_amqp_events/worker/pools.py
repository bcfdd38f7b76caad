"""Which of Celery's pools can handle events."""

from __future__ import annotations

from typing import Any, Final

from celery.concurrency import get_implementation

GREEN: Final = ("gevent", "eventlet")
#: Celery's own names, which need no import.
NAMES: Final = frozenset({"prefork", "processes", "solo", "threads"})

_REMEDY: Final = (
    "Use --pool prefork, threads or solo, or keep this worker off the handlers' queues with -Q."
)


def pool_problem(pool: Any, autoscale: object = None) -> str:
    """Return why a worker cannot handle events, ``""`` if it can.

    Args:
        pool: the pool's class, or its name or path.
        autoscale: the worker's option ``--autoscale``.
    """
    name = pool if isinstance(pool, str) else f"{pool.__module__}:{pool.__qualname__}"
    for green in GREEN:
        if green in name:
            return f"the {green} pool is not supported. {_REMEDY}"
    if name in NAMES and not autoscale:
        return ""
    try:
        implementation: Any = get_implementation(pool)
    except Exception as exc:  # noqa: BLE001 - a module of the project may raise anything
        return f"the pool {name} cannot be imported ({type(exc).__name__}: {exc}). {_REMEDY}"
    # Not at the top: a check of the settings needs none of them.
    from celery.concurrency import prefork, solo, thread

    known = (prefork.TaskPool, solo.TaskPool, thread.TaskPool)
    if not isinstance(implementation, type) or not issubclass(implementation, known):
        return f"the pool {name} is not supported. {_REMEDY}"
    if autoscale and not issubclass(implementation, prefork.TaskPool):
        return f"--autoscale is not possible with the pool {name}. Use --pool prefork."
    return ""
