"""How long a pipeline takes: as events that can be drawn (`simulate.py`), and for many at once (`spans.py`)."""
