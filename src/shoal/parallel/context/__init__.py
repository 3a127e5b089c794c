"""Context parallelism: a sequence cut among ranks, and attention across the cuts."""
