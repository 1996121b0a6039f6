"""A whole scan: inputs, checks, levels, the job for the worker, and the result put together."""
