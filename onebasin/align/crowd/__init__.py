"""Many networks: one frame for all."""
