"""A student of the two papers builds both tables in small: how compact is a posterior, and how much of it is symmetry?

`python examples/student.py` takes some ten seconds and writes the folder student/. The whole papers are
`onebasin reproduce compact` and `onebasin reproduce symmetry`.
"""

from pathlib import Path

import matplotlib.pyplot as plt

import onebasin as ob

FOLDER = Path("student")


def main() -> None:
    """Sample in two ways, make a table of each paper, and show all of it on one page."""
    FOLDER.mkdir(exist_ok=True)
    train, test = ob.data.split(*ob.data.digits(), test=0.5, seed=0)
    model = ob.examples.digits_mlp()
    symmetry = ob.discover(model, train[0][:2])
    hmc = ob.HMC(draws=15, warmup=20, leapfrog=10, epochs=20)
    chains = ob.sample(model, train, hmc, chains=2, prior=0.3)
    trainings = ob.sample(model, train, ob.Ensemble(epochs=20), chains=6, prior=0.3)

    # Xiao, Liu & Bamler 2023: one Gaussian in place of many networks, fitted before and after alignment.
    forms = {
        "all networks": chains,
        "two of them": chains[::15],
        "fit": ob.fit(chains, model=model),
        "fit, aligned": (fitted := ob.fit(ob.align(chains, symmetry).population, model=model)),
        "refined": ob.refine(model, fitted, chains, train[0], steps=120, draws=16),
    }
    reference = ob.predict(model, chains, test[0], average=True)
    print(f"{'':15s}{'accuracy':>9s}{'nll':>8s}{'distance':>10s}")
    for name, form in forms.items():
        predicted = ob.predict(model, form, test[0], average=True, draws=100)
        numbers = [ob.metrics.accuracy(predicted, test[1]), ob.metrics.nll(predicted, test[1])]
        far = ob.metrics.total_variation(predicted, reference)
        print(f"{name:15s}{float(numbers[0]):9.3f}{float(numbers[1]):8.3f}{float(far):10.3f}")

    # Laurent, Aldea & Franchi 2024: how far are two populations apart, with and without symmetries?
    apart = ob.discrepancy(
        chains, trainings, symmetry=symmetry, model=model, inputs=test[0][:100], permutations=99, n_resamples=50
    )
    lightest = ob.balance(trainings, symmetry)
    functions = ob.diversity(model, trainings, test[0][:200], ood=ob.data.photographs()[:200])
    print(apart)

    apart.plot()
    plt.savefig(FOLDER / "discrepancy.png")
    refined = forms["refined"]
    evaluation = ob.evaluate(model, refined, test, reference=chains, draws=50, n_resamples=50)
    print(
        ob.report(
            FOLDER / "page", refined, evaluation, apart, lightest, functions, title="Two papers in small", figures=False
        )
    )


if __name__ == "__main__":
    main()
