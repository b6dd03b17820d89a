"""The decoder and its checkpoints. Knows nothing of paging, sub-batches or offload."""
