"""Optional fast paths through py-amqp."""
