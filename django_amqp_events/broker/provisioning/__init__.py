"""Compare what a service declares with what RabbitMQ has, and change it."""
