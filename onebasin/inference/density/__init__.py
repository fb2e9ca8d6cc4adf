"""What is sampled: the posterior as a function of flat positions, and where the weights lie in them."""
