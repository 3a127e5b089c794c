"""The built-in models, free of any parallel code: what a user would write for one device."""
