"""The TOML files that users and `shoal calibrate` write: one schema, one reader, one writer."""
