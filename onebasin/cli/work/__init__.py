"""The work of the verbs: each calls the library and prints; imported when a verb runs, for --help needs no torch."""
