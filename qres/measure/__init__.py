"""What the worker process does: models side by side, chunk by chunk, to running statistics and records."""
