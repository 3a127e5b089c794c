"""A module that cannot be imported."""

raise RuntimeError("it cannot be imported")
