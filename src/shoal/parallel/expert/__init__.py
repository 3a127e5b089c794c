"""Expert parallelism: experts dealt out, and tokens that travel to them and back."""
