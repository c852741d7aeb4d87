"""Doors to other packages. Nothing here is imported by itself, and each module needs the package it is named after."""
