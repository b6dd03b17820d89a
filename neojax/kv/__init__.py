"""Where KV bytes live: the device pool, the host pool, and how large they may be."""
