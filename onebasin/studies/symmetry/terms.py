"""Words of the study, for the glossary of its report."""

from __future__ import annotations

TERMS = {
    "network": "one set of weights for an architecture; another set that computes the same function is another network",
    "symmetry": "a change of the weights that leaves the function of a network as it was: units change places "
    "(permutation), or a unit gets larger weights in and smaller ones out (scale)",
    "orbit": "all networks that symmetries make of one",
    "normal form": "one chosen network of each orbit: here rows of length 1, sorted by their largest entry",
    "mode": "a place where networks end that were trained; each independent run finds its own",
    "one mode": "all networks of a crowd come from one training run",
    "multi mode": "as many networks, but from several independent runs",
    "reference": "independent trainings of the same architecture, which the paper takes for the posterior",
    "posterior": "how probable each network is, given the training examples and a Gaussian prior of the weights",
    "HMC": "Hamiltonian Monte Carlo: draws from the posterior itself, if its chains are long enough",
    "chain": "successive draws of one run of a sampler; neighbours are alike",
    "MMD": "maximum mean discrepancy: a distance of two sets of networks; here 10 x its square, without bias",
    "NS": "no symmetry: the same distance after symmetries were removed from both sets",
    "dropout": "training with units left out at random; a draw is a network with some of its units left out",
    "viBNN": "variational inference: the closest Gaussian with independent weights",
    "SWAG": "a Gaussian through the places that SGD visits after training",
    "Laplace": "a Gaussian whose shape is the curvature of the loss at a trained network; here of its last layer",
    "SGHMC": "stochastic gradient Hamiltonian Monte Carlo: a chain of noisy steps on small batches",
    "deep ensemble": "independently trained networks, whose probabilities are averaged",
    "ECE": "expected calibration error: how far confidence is from accuracy, in bins of confidence",
    "ACE": "adaptive calibration error: the same for every class, in bins that hold equally many examples",
    "Brier score": "squared distance between predicted probabilities and what was the case",
    "AUPR": "area under the curve of precision and recall for telling familiar inputs from foreign ones",
    "FPR95": "share of foreign inputs that are taken for familiar where 95 % of the familiar ones are",
    "mutual information": "how much networks disagree, in nats: entropy of their mean prediction minus their mean "
    "entropy; ID on test inputs, OOD on foreign ones",
    "functional collapse": "two networks that were trained independently and compute nearly the same",
    "equal marginals": "every unit of a layer has the same distribution over independent trainings",
    "exchangeability": "units can take each other's part: which of them holds the largest weight is left to chance",
    "mass": "the sum of squared weights of a network",
    "min-mass": "the smallest mass that scales can give to a network without changing its function",
    "excess mass": "how much heavier a network is than the lightest of its orbit, in per cent",
    "Kendall's tau": "how alike two orders are: 1 for the same, -1 for the reverse",
    "R-hat": "whether chains agree: 1 if they do, larger if each stays where it is",
}
