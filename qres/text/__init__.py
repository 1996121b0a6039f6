"""Text to chunks of token ids."""
