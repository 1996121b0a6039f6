"""What quantizing one tensor or one unit alone does: predicted by one backward pass, measured by patching."""
