"""Comparisons: a grid of experiments times paired seeds, made once, with a table and plots."""
