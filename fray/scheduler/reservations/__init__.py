"""Reservations."""
