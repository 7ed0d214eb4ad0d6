"""Speculative decoding that changes the speed and never the answer: verification, its schedule, and its figures.

Who drafts does not matter here: a draft is kept where it is the token that the model's own row draws, and that row has
the noise of its position. A step's drafts, and how many of them it verifies, are therefore free.
"""
