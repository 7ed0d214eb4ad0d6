"""Structured output: what a request may ask for, a limit on compiling it, and grammars that start at a trigger."""
