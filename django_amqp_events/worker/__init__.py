"""Handle events: what happens in a worker between a delivery and its settlement.

The path of a delivery through the modules. In the worker's main process, which consumes, hands out
and acks:

``celery_signals``     waits for Celery to signal that this process is a worker
``bootstrap``          installs the steps; lists what is replaced on Celery's instances
``step``               consumes the handlers' queues
``prefetch``           decides how many events are taken in advance (pure)
``delivery``, ``jobs`` hand deliveries to the pool in jobs, and settle them by the outcomes
``backlog``            holds what waits for a process, and decides whose turn it is (rate limits)
``task_events``        sends Celery's task events
``acks``               acks and requeues

In a process of the pool, which validates, runs, decides and publishes:

``pool_job``           carries out a job
``reading``            reads a delivery: event, handler, whether it is due (pure)
``tracing``            runs the handler under Celery's tracer
``task``, ``binding``  the Celery task of a handler; binds the payload to its parameters
``inbox``              effects in the database happen once
``verdict``            decides: handled, retry, archive or requeue (pure)
``outgoing``           builds the message that a verdict publishes (pure)

Beside it: ``reaper`` runs events alone whose workers have died; ``remote_control``, ``wakeup``,
``stop_signals``, ``hang_detector`` and ``connection_errors`` serve the main process;
``celery_internals`` holds every use of a private name of Celery, kombu and billiard.
"""
