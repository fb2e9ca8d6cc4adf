"""Words that options choose from, written out so that --help needs no torch; a test compares them with the library."""

ALIGN_SCALES = ("balanced", "reference", "keep")
STATISTICS = ("uncentred", "centred", "correlation")
COMPANIONS = ("std", "variance", "mask", "gradient", "squared-gradient")
MATCH_SCALES = ("reference", "keep")
FORM = "balanced/max"
PRESETS = ("median", "pooled", "paper", "paper-floors")
LIKELIHOODS = (
    "categorical", "bernoulli", "gaussian", "laplace", "student_t", "mixture", "beta_nll", "evidential_values",
    "evidential_classes", "focal", "label_smoothing",
)  # fmt: skip
LINEARISED = ("sampled", "probit")
CLASS_LIKELIHOODS = ("categorical", "bernoulli")
CALIBRATIONS = ("temperature", "vector", "matrix", "isotonic")
CALIBRATED = ("population", "member", "average")
CORRUPTIONS = ("gaussian_noise", "gaussian_blur", "contrast", "brightness", "pixelate")
LOSSES = ("cross-entropy", "mse")
FAMILIES = ("diagonal", "low-rank", "mixture")
CRITERIA = ("snr", "signal-plus-noise", "magnitude", "sigma", "sigma-high", "random")
SCOPES = ("global", "tensor")
METHODS = (
    "hmc", "sghmc", "mclmc", "ensemble", "vi", "swa", "ema", "swag", "laplace", "dropout", "batchensemble", "lpbnn",
    "masksembles", "mimo", "mcbatchnorm",
)  # fmt: skip
RECIPES = ("resnet20-frn-cifar10", "resnet18-cifar10", "resnet18-cifar100", "resnet18-tiny-imagenet", "optunet-mnist")

OWN_EXAMPLES = 1347  # of own data in `reproduce --preset quick`: as many as its digits have for training

SIZE_GRAMMAR = "[NAME=][KIND:]SIZE, as in 2x3x32x32, ids:2x16, ids30522:2x16, bool:2x8 or mask=bool:2x8"
_INPUT_FILES = ".npz, .npy or .safetensors with inputs (or x, X; inputs.NAME for each of several)"
INPUT_GRAMMAR = f"a word such as digits, mnist:test or uci/boston (see sample), or {_INPUT_FILES}"
DATA_GRAMMAR = f"{INPUT_GRAMMAR} and targets (or y, Y)"
