"""The built-in tasks: real data, a model, and settings that are known to learn, at several sizes."""
