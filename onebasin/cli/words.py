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
LOSSES = ("cross-entropy", "mse")
FAMILIES = ("diagonal", "low-rank", "mixture")
CRITERIA = ("snr", "signal-plus-noise", "magnitude", "sigma", "sigma-high", "random")
SCOPES = ("global", "tensor")
METHODS = ("hmc", "sghmc", "mclmc", "ensemble", "vi", "swag", "laplace", "dropout")

OWN_EXAMPLES = 1347  # of own data in `reproduce --preset quick`: as many as its digits have for training

SIZE_GRAMMAR = "[NAME=][KIND:]SIZE, as in 2x3x32x32, ids:2x16, ids30522:2x16, bool:2x8 or mask=bool:2x8"
_INPUT_FILES = ".npz or .safetensors with inputs (or x, X; inputs.NAME for each of several)"
INPUT_GRAMMAR = f"a word such as digits, mnist:test or uci/boston (see sample), or {_INPUT_FILES}"
DATA_GRAMMAR = f"{INPUT_GRAMMAR} and targets (or y, Y)"
