"""Attempts."""
