"""What tensor parallelism can split, found by propagating a split dimension through a trace."""
