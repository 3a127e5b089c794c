"""Techniques that consist of one file each: compressors, all-reduce algorithms, ways to synchronise.

A file holds all that is known of its technique: how the algebra describes it, what it sends, what it costs, and how it
runs. `strategy/terms` finds the files by listing the folders; nothing else names them. Importing one needs no torch:
what computes imports it inside its functions. docs/contributing.md shows how to add one.
"""
