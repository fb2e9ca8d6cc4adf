"""The curvature of the loss at a network: the GGN in full, by its diagonal, or by Kronecker factors."""
