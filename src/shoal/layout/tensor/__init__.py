"""What tensor parallelism may cut, found by following a cut dimension through a trace."""
