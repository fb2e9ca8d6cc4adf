"""The command line: one verb per file; each parses, calls the library and prints. Nobody imports this room."""
