"""Comparisons: Shoal's strategies and other frameworks under one protocol, a guard against unfair pairs, a report."""
