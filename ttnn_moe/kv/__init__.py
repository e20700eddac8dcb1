"""KV caches: where keys and values lie, and the attention that reads them."""
