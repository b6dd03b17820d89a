"""The engine: steps the scheduler and the runner, and the process that serves them to HTTP."""
