"""A job's step on the machine at hand: its operators by measured curves, what its strategy sends by measured links."""
