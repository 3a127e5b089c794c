"""Search over architectures and hyper-parameters: trials in parallel, each a job under a strategy."""
