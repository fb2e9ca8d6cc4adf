"""Normal forms without a reference."""
