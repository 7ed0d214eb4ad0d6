"""Balancing of the routed experts over their ranks: counts, policies, moves. No move changes a bit of an answer."""
