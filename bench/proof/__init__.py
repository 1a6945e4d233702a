"""Measuring tools. May import supervisor, never the reverse."""
