"""Records to text: nothing is measured or written here."""
