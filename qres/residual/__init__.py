"""The residual stream: found in the graph, captured in runs, compared."""
