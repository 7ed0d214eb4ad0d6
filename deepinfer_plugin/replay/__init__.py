"""Bounded replay: which prompt rows each half of the model computes, as a function of the prompt alone."""
