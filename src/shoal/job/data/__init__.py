"""Where samples come from: tensors in memory, any torch dataset, text, images. Each is a pure function from
indices to a batch.
"""
