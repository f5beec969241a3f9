"""Where machines come from: one module a provider, behind the seam of `base`."""
