"""A Result as a page or as Markdown: pure functions from records to text; nothing is measured or written here.

Empty on purpose: the charts take a quarter of a second to import, and who formats a number does not draw.
"""
