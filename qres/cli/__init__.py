"""The command line: options in, an answer out; the only place that knows the terminal."""
