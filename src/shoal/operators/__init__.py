"""Convolution computed in four ways, and the choice of the fastest for a layer (docs/operators.md).

y = convolve(x, weight, bias, padding=1, method="winograd")
model = fastest(model, images)
"""

from shoal.operators.convolve import METHODS, CannotConvolve, convolve
from shoal.operators.measured import ConvolutionBy, Timing, fastest, time_methods

__all__ = ["METHODS", "CannotConvolve", "ConvolutionBy", "Timing", "convolve", "fastest", "time_methods"]
