"""Proof of batch invariance: relations, schedules, mutants, certificates."""
