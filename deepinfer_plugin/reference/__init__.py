"""The text model in plain PyTorch, the oracle every other implementation is held against."""
