"""Batch-invariant mode: what it pins, which operations it trusts on which device, and the check that finds the rest."""
