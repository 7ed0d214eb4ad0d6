"""Graders: from the text of an answer to a verdict. Only the final text counts, never the reasoning before it."""
