"""Text to token ids and back, chat templates included. Imports no jax: the HTTP process uses it."""
