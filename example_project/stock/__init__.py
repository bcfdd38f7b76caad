"""What the shop has on its shelves."""
