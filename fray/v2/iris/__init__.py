"""Iris."""
