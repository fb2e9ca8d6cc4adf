"""The top of the report, and its glossary."""

from __future__ import annotations

from collections.abc import Sequence

from onebasin.record import VERDICTS, Section, tally

TERMS = {
    "agreement": "Share of inputs for which two average predictives choose the same class.",
    "barrier": "How much higher the loss is on the straight line between two networks than at its ends, here at the "
    "midpoint: L((a + b) / 2) - (L(a) + L(b)) / 2.",
    "deep ensemble": "Networks trained independently from different starts; here maximum a posteriori.",
    "ECE": "Expected calibration error: mean gap between how sure a predictive is and how often it is right.",
    "effective sample size": "As many independent samples would know a mean as precisely as these dependent ones.",
    "HMC": "Hamiltonian Monte Carlo: samples of the posterior with gradients over all training examples.",
    "NLL": "Negative log likelihood of the labels under the average predictive, in nats per example.",
    "number of transpositions": "Least number of swaps of two hidden units that makes a permutation: n minus its "
    "number of cycles. A random permutation of n units has n - H_n on average, H_n = 1 + 1/2 + ... + 1/n.",
    "q_d": "Gaussian with the mean and the standard deviation of every weight over networks as they came.",
    "q_r": "The same over networks after rebasin to the first of them.",
    "R-hat": "Spread between chains over spread within them; 1 where they agree, below 1.05 where they have mixed.",
    "rebasin": "Permute the hidden units of a network so that it lies in the basin of another; its function stays.",
    "refined": "Moved by gradient until draws predict what the samples predict, on unlabelled training inputs.",
    "sigma": "Standard deviation of a weight under a posterior.",
    "signal to noise": "|mean| / standard deviation of a weight.",
    "total variation": "Half the sum of absolute differences between two class distributions, averaged over inputs.",
    "variational inference": "The Gaussian with independent weights that is closest to the posterior in KL divergence.",
}


def summarise(sections: Sequence[Section]) -> list[str]:
    """How many claims hold, those that do not, and the answer of each part."""
    claims = [claim for section in sections for claim in section.claims]
    failed = [f"Not reproduced: {claim.text} Found: {claim.found}." for claim in claims if claim.verdict == VERDICTS[2]]
    answers = [section.text[0] for section in sections]
    return [f"Of {len(claims)} claims: {tally(claims)}.", *failed, *answers] if claims else answers
