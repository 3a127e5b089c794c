"""Gradient compression: what is kept as error (`feedback.py`), how a tensor becomes bytes (a codec a file), how bytes
are exchanged (`exchange.py`). `table.method_of` turns a term into the method that runs it; `traffic.py` predicts what
it sends. Nothing is imported here, so that predictions need no torch.
"""
