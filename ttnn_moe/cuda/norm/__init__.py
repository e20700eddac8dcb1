"""Norms of a decoder layer on a GPU."""
