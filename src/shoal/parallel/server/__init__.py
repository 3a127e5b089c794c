"""Parameter servers: who updates the model, when, and in which order (`via=ps(...)`)."""
