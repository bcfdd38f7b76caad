"""Optional fast paths of workers; each can be deleted without touching its neighbours."""
