"""RabbitMQ: connections, confirms, topology, provisioning, batch reading."""
