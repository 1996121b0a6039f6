"""One chart definition for the page and for images."""
