"""Fray."""
