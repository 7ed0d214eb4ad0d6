"""Engines in a child process, driven by a plan: for tests of the engine and of determinism.

Triton's interpreter and vLLM's global state stay in the child. ``plan.py`` says what to run, ``run.py`` starts the
child and reads its results, ``child.py`` is the child, ``faults.py`` holds faults that a test can plant.
"""
