"""Which modules are experts, found in one small run."""
