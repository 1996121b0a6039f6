"""What the KLD of a level is made of, unit by unit."""
