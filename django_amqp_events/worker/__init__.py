"""Handling: what happens in a worker between a delivery and its settlement.

The flow, in the order of the modules:

``entry``       waits for Celery to say that this process is a worker
``bootstrap``   installs the step in a Celery worker
``consumer``    the step: consumes the handlers' queues, rebuilds each delivery
``dispatch``    says what a delivery is: whose, and whether now: pure
``request``     Celery's request for a delivery: acks only on a verdict
``task``        runs the handler, in the pool's child
``verdict``     decides what becomes of the delivery: pure
``copies``      builds what a verdict publishes: pure
``settlement``  publishes what the verdict asks for, confirmed, then acks
``watch``       names handlers that do not end
``stopping``    keeps a cold shutdown from hanging
``reaper``      the step of another worker: runs alone what ended its worker
"""
