"""The command line: one verb per file, with its options; what it does is in `work`. No other package imports it."""
