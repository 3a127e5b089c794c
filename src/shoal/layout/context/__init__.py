"""Where the sequence of a model may be cut, for context parallelism."""
