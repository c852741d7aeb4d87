"""Integrations with other packages. Nothing here is imported automatically."""
