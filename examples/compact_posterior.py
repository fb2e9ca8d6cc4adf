"""A Markov chain of networks becomes one posterior in the storage of two networks.

Run it with `python examples/compact_posterior.py`; it takes some ten seconds.
"""

import torch

import onebasin as ob
from onebasin.data.dataset import split
from onebasin.data.load import digits
from onebasin.examples.small import digits_mlp


def main() -> None:
    """Sample, align, fit, refine, and see what each form still predicts."""
    train, test = split(*digits(), test=0.5, seed=0)
    model = digits_mlp()
    method = ob.HMC(draws=40, warmup=40, leapfrog=10, epochs=20)
    chains = ob.sample(model, train, method, chains=2, prior=0.3)
    symmetry = ob.discover(model, test[0][:2])
    fitted = ob.fit(ob.align(chains, symmetry).population, model=model)
    refined = ob.refine(model, fitted, chains, train[0], steps=500, draws=32)

    everything = ob.predict(model, chains, test[0], average=True)
    forms = {"2 of the networks": chains[::40], "10 of the networks": chains[::8], "fit": fitted, "refined": refined}
    print(f"{len(chains)} networks; distance of the average predictive from theirs on held-out digits")
    for name, form in forms.items():
        predicted = ob.predict(model, form, test[0], average=True, draws=300)
        far = float(ob.metrics.total_variation(predicted, everything))
        same = float(ob.metrics.agreement(predicted, everything))
        stored = form.storage if isinstance(form, ob.Posterior) else len(form)
        print(f"  {name:20s} stored {stored:3.0f}  total variation {far:.3f}  agreement {same:.3f}")

    noise = torch.rand(500, 64, generator=torch.Generator().manual_seed(0))
    print(ob.evaluate(model, refined, test, ood=noise, reference=chains, n_resamples=200))


if __name__ == "__main__":
    main()
