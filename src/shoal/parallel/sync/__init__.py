"""Loose levels of dp: what ties islands together that step by themselves. One file a scheme."""
