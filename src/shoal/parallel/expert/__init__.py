"""Expert parallelism: experts split among ranks, and tokens that travel to them and back."""
