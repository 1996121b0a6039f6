"""Statistics of a comparison; pure numpy, no model."""
