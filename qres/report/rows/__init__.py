"""The rows that charts draw."""
