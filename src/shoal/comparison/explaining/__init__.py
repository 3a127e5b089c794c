"""What held a run back, why two runs differ, and why one failed."""
