"""A Result as a page or as Markdown: pure functions from records to text; nothing is measured or written here."""

from qres.report.html import render_html
from qres.report.markdown import Markdown, render_markdown

__all__ = ["Markdown", "render_html", "render_markdown"]
