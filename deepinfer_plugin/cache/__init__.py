"""KV records, the cache layers that own them and the metadata that addresses them."""
