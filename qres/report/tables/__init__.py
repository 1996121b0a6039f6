"""The tables of a report: numbers decided here, placed by the renderers."""
