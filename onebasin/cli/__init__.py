"""The command line: one verb per file; each parses, calls the library and prints. No other package imports it."""
