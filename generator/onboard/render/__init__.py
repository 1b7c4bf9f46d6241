"""Renders the package: Jinja templates, what they are given, and the style of generated code."""
