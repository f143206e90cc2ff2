"""Programs around the engine: the command line."""
