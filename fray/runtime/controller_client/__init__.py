"""Controller client."""
