"""From predictions to a file: a budget, the best types within it, built, verified and refined."""
