"""Measured figures to advice: what to keep at 16 bit, which level to ship, what fits a device."""
