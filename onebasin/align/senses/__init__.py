"""What units do: activations read, compared and matched."""
