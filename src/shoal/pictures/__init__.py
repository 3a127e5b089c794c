"""Schematic pictures of a strategy's axes: which part of the batch, of the matrices, of the sequence or of the experts
each rank holds, and what travels between ranks. Pipelines have a picture of their own, the timeline.
"""

from shoal.pictures.draw import MOST_RANKS, NothingToDraw, picture_svg

__all__ = ["MOST_RANKS", "NothingToDraw", "picture_svg"]
