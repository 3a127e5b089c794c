"""Loose levels of dp: what ties islands together that step by themselves. A scheme is a file of `technique/sync`."""
