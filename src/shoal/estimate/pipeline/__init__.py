"""How long a pipeline takes: as events that can be drawn (`play.py`), and for many pipelines at once (`spans.py`)."""
