"""Inference methods, one per file, and the list of those that a word stands for."""

from onebasin.errors import explain_construction
from onebasin.inference.kernel import Method
from onebasin.inference.methods.batchensemble import BatchEnsemble
from onebasin.inference.methods.dropout import Dropout
from onebasin.inference.methods.ema import EMA
from onebasin.inference.methods.ensemble import Ensemble
from onebasin.inference.methods.hmc import HMC
from onebasin.inference.methods.laplace import Laplace
from onebasin.inference.methods.lpbnn import LPBNN
from onebasin.inference.methods.masksembles import Masksembles
from onebasin.inference.methods.mc_batch_norm import MCBatchNorm
from onebasin.inference.methods.mclmc import MCLMC
from onebasin.inference.methods.mimo import MIMO
from onebasin.inference.methods.sghmc import SGHMC
from onebasin.inference.methods.swa import SWA
from onebasin.inference.methods.swag import SWAG
from onebasin.inference.methods.vi import VI

METHODS: dict[str, type[Method]] = {
    "hmc": HMC,
    "sghmc": SGHMC,
    "mclmc": MCLMC,
    "ensemble": Ensemble,
    "vi": VI,
    "swa": SWA,
    "ema": EMA,
    "swag": SWAG,
    "laplace": Laplace,
    "dropout": Dropout,
    "batchensemble": BatchEnsemble,
    "lpbnn": LPBNN,
    "masksembles": Masksembles,
    "mimo": MIMO,
    "mcbatchnorm": MCBatchNorm,
}
for method in METHODS.values():
    explain_construction(method)

__all__ = [
    "EMA",
    "HMC",
    "LPBNN",
    "MCLMC",
    "METHODS",
    "MIMO",
    "SGHMC",
    "SWA",
    "SWAG",
    "VI",
    "BatchEnsemble",
    "Dropout",
    "Ensemble",
    "Laplace",
    "MCBatchNorm",
    "Masksembles",
]
