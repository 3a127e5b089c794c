"""Small tools that every room may use: they import nothing of Shoal, and neither torch nor numpy."""
