"""Attention: on the device over the paged pool, and on the host through start and join."""
