"""Gradient compression: what a compressor is (`compressor.py`), how payloads are laid out (`payload.py`) and exchanged
(`exchange.py`), and a reduction by one (`method.py`); `traffic.py` predicts what it sends. The compressors themselves
are `technique/compress`. Nothing is imported here, so that predictions need no torch.
"""
