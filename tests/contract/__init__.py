"""The same cases on the in-memory broker and on RabbitMQ with a real worker."""
