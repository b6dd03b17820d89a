"""The HTTP process: OpenAI's API in front of the engine process. Never imports jax."""
