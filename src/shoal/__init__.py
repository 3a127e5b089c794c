"""Shoal trains one neural network on many machines by any technique of distributed deep learning.

Strategies are ordinary values: `from shoal import dp, tp` and multiply. What needs torch is loaded when it is asked for.
"""

from shoal.strategy import *  # noqa: F403

__version__ = "0.1.0"
