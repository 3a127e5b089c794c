"""Which modules are experts, found by watching one small run."""
