"""What the shop sells: orders, and the events about them."""
