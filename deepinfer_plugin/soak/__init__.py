"""Soak: a server under good and hostile requests at once; every good answer must be the one it gives alone."""
