"""The command line: what it prints, which exit code it leaves, and that every mistake gets one helpful sentence."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from onebasin import Symmetry, discover
from onebasin.cli import inputs, load, progress, words
from onebasin.cli.main import group
from onebasin.cli.work import discover as discover_verb
from onebasin.errors import InputError, ModelError, OnebasinError
from onebasin.parallel import TimeLeft

ROOT = Path(__file__).resolve().parents[2]

MODELS = """
import torch
from torch import nn

class Needy(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()

class Ready(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    def forward(self, x):
        return self.body(x)

def factory():
    return Ready()

def two_inputs():
    return nn.Bilinear(3, 4, 2)

def words():
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))

def number():
    return 3

def explodes():
    return nn.Linear(-1, "two")

instance = nn.Linear(4, 2)
constant = 5
"""


pytestmark = pytest.mark.usefixtures("restored_imports")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


Run = Callable[..., tuple[int, str, str]]


def test_version_and_help(run: Run) -> None:
    code, out, _ = run("--version")
    assert (code, out) == (0, "onebasin 0.1.0\n")
    code, out, _ = run("discover", "-h")
    assert code == 0
    assert "--input" in out


def test_help_and_completion_need_no_torch() -> None:
    """In a process of its own: the help of every verb, and what a shell asks for while options are typed."""
    code = (
        "import os, sys\n"
        "from click.shell_completion import BashComplete\n"
        "from onebasin.cli.main import group, main\n"
        "for verb in ['', *group.commands]:\n"
        "    assert main([*verb.split(), '--help']) == 0\n"
        "    for typed in ('', '--'):\n"
        "        BashComplete(group, {}, 'onebasin', '').get_completions(verb.split(), typed)\n"
        "names = BashComplete(group, {}, 'onebasin', '').get_completions(['sample', '--method'], 's')\n"
        "print([item.value for item in names], [name for name in ('torch', 'rich', 'numpy') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.splitlines()[-1] == "['sghmc', 'swa', 'swag'] []"
    assert set(group.commands) >= {"diagnose", "sample"}


def test_align_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """With its symmetry at hand it needs no tracer, and never more of scipy than the solver."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    discover(model, torch.zeros(2, 3)).save(tmp_path / "symmetry.json")
    folder = tmp_path / "networks"
    folder.mkdir()
    for number in range(3):
        save_file(dict(model.state_dict()), folder / f"{number}.safetensors")
    heavy = (
        "torch._dynamo",
        "sympy",
        "scipy.optimize",
        "scipy.stats",
        "sklearn",
        "matplotlib",
        "transformers",
        "pandas",
    )
    arguments = [str(folder), "--symmetry", str(tmp_path / "symmetry.json"), "-o", str(tmp_path / "aligned")]
    code = (
        "import sys\n"
        "from onebasin.cli.main import main\n"
        f"assert main(['align', *{arguments!r}]) == 0\n"
        f"print([name for name in {heavy!r} if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "aligned").is_dir()


def test_the_words_of_options_are_those_of_the_library() -> None:
    from onebasin import alignment, data, evaluation, functional, inference, posterior, symmetry

    assert words.ALIGN_SCALES == alignment.ALIGN_SCALES
    assert words.STATISTICS == alignment.KINDS
    assert words.MATCH_SCALES == alignment.MATCH_SCALES
    assert words.FORM == alignment.FORM
    assert tuple(kind for kind in symmetry.KINDS if kind != "value") == words.COMPANIONS
    assert tuple(evaluation.PRESETS) == words.PRESETS
    assert (*functional.KINDS, *functional.LIKELIHOODS) == words.LIKELIHOODS
    assert words.CALIBRATIONS == evaluation.CALIBRATIONS
    assert words.CALIBRATED == evaluation.CALIBRATED
    assert tuple(data.CORRUPTIONS) == words.CORRUPTIONS
    assert set(words.CLASS_LIKELIHOODS) == set(functional.KINDS) - {"gaussian"}
    assert words.FAMILIES == posterior.FAMILIES
    assert words.CRITERIA == posterior.CRITERIA
    assert words.SCOPES == posterior.SCOPES
    assert words.LINEARISED == posterior.LINEARISED
    assert tuple(inference.METHODS) == words.METHODS
    assert tuple(inference.RECIPES) == words.RECIPES


def test_module_and_console_script_are_one_program() -> None:
    for command in ([sys.executable, "-m", "onebasin"], [str(Path(sys.executable).with_name("onebasin"))]):
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert result.stdout.startswith("onebasin ")


@pytest.mark.parametrize("name", ["factory", "Ready", "instance"])
def test_factory_class_and_instance(run: Run, models: Path, name: str) -> None:
    code, out, err = run("discover", f"{models}:{name}", "--input", "2x4")
    assert (code, err) == (0, "")
    assert out.strip()


def test_the_example_file_brings_its_own_input(run: Run) -> None:
    code, out, _ = run("discover", f"{ROOT / 'examples' / 'digits_cnn.py'}:digits_cnn", "--verify")
    assert code == 0
    assert out.strip()


def test_a_module_of_an_installed_package(run: Run) -> None:
    code, _, err = run("discover", "onebasin.examples:relu_mlp", "--input", "2x16")
    assert (code, err) == (0, "")


def test_json_is_json_only_and_is_written_to_the_file(run: Run, models: Path, tmp_path: Path) -> None:
    target = tmp_path / "symmetry.json"
    code, out, _ = run("discover", f"{models}:factory", "--input", "2x4", "--json", "--verify", "--output", target)
    assert code == 0
    assert json.loads(out) == json.loads(target.read_text())
    assert Symmetry.from_json(out).to_json() == out.strip()


def test_one_seed_one_output(run: Run, models: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    arguments = ("discover", f"{models}:factory", "--input", "2x4", "--verify", "--seed", "3")
    assert run(*arguments) == run(*arguments)
    assert torch.equal(before, torch.get_rng_state())


def test_weights(run: Run, models: Path, tmp_path: Path) -> None:
    reference = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).half()
    torch.save({f"body.{name}": value for name, value in reference.state_dict().items()}, tmp_path / "good.pt")
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "other.pt")
    arguments = ("discover", f"{models}:factory", "--input", "2x4", "--weights")
    assert run(*arguments, tmp_path / "good.pt")[0] == 0
    code, _, err = run(*arguments, tmp_path / "other.pt")
    assert code == 4
    assert "body.0.weight" in err
    code, _, err = run(*arguments, tmp_path / "absent.pt")
    assert code == 5
    assert "absent.pt" in err


def test_the_demo_refuses_an_unwritable_place_before_the_work(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("demo", "--output", tmp_path / "file" / "below")
    assert (code, out) == (7, "")
    assert "choose another place" in err


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Needy", "needs width; write a function without arguments beside it"),
        ("number", "returned a int; it should return an nn.Module"),
        ("constant", "is a int; it should be a function without arguments"),
        ("factorie", "did you mean"),
        ("zzz", "it has Needy, Ready, explodes, factory, instance"),
        ("explodes", "line 29: return nn.Linear(-1"),
    ],
)
def test_a_wrong_factory_gets_one_sentence(run: Run, models: Path, name: str, sentence: str) -> None:
    code, out, err = run("discover", f"{models}:{name}", "--input", "2x4")
    assert (code, out) == (ModelError.exit_code, "")
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("models.py", "names no factory"),
        ("absent/models.py:factory", "There is no file absent/models.py"),
        ("absent.module:factory", "There is no module absent.module"),
        ("..bad:factory", "There is no module ..bad"),
    ],
)
def test_a_wrong_reference_gets_one_sentence(run: Run, reference: str, sentence: str) -> None:
    code, _, err = run("discover", reference, "--input", "2x4")
    assert code == ModelError.exit_code
    assert sentence in err
    assert "Traceback" not in err


def test_a_file_with_a_near_name_is_suggested(run: Run, models: Path) -> None:
    code, _, err = run("discover", f"{models.with_name('model.py')}:factory")
    assert code == ModelError.exit_code
    assert f"did you mean {models}?" in err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import torch\nimport absent_package\n", "line 2: import absent_package"),
        ("def f(:\n    pass\n", "(line 1: def f(:)"),
        ("x = 1\nraise SystemExit(3)\n", "SystemExit: 3"),
        ("import torch\ntorch.zeros(2).view(3)\n", "line 2: torch.zeros(2).view(3)"),
    ],
)
def test_a_file_that_raises_shows_its_line(run: Run, tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    code, _, err = run("discover", f"{tmp_path / 'broken.py'}:f")
    assert code == ModelError.exit_code
    assert sentence in err
    assert "Traceback" not in err


def test_a_file_inside_a_package_may_import_its_siblings(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a_package_of_models"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "parts.py").write_text("from torch import nn\n\ndef part():\n    return nn.Linear(4, 2)\n")
    (folder / "whole.py").write_text("from .parts import part\n\ndef build():\n    return part()\n")
    assert run("discover", f"{folder / 'whole.py'}:build", "--input", "2x4")[0] == 0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["2x"], "'2x' is not an input; expected [NAME=][KIND:]SIZE"),
        (["int:2"], "expected [NAME=][KIND:]SIZE"),
        (["2x0"], "each size must be at least 1"),
        (["2x4", "x=2x4"], "either all positional or all named"),
        (["x=2x4", "x=2x4"], "each name once"),
        (["900000x900000x900000"], "give smaller sizes"),
        (["2x5"], "float32[2x5]"),
        (["y=2x4"], "y=float32[2x4]"),
        ([], "define example_input() beside the factory"),
    ],
)
def test_a_wrong_input_gets_the_remedy(run: Run, models: Path, given: list[str], sentence: str) -> None:
    code, out, err = run("discover", f"{models}:factory", *[part for text in given for part in ("--input", text)])
    assert (code, out) == (InputError.exit_code, "")
    assert sentence in err
    assert "Traceback" not in err


def test_several_inputs_by_position_and_by_name(run: Run, models: Path) -> None:
    assert run("discover", f"{models}:two_inputs", "--input", "2x3", "--input", "2x4")[0] == 0
    assert run("discover", f"{models}:two_inputs", "--input", "input2=2x4", "--input", "input1=2x3")[0] == 0


def test_ids_stay_inside_the_vocabulary(run: Run, models: Path) -> None:
    assert run("discover", f"{models}:words", "--input", "ids:50x6")[0] == 0
    code, _, err = run("discover", f"{models}:words", "--input", "ids:50x6", "--vocabulary", "5000")
    assert code == InputError.exit_code
    assert "int64[50x6]" in err


def test_drawn_inputs() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Embedding(5, 4)).double()
    drawn = inputs.draw(["ids:99", "ids3:99", "ids<2>:99", "bool:2x8", "float:7"], model, vocabulary=None, seed=0)
    assert isinstance(drawn, tuple)
    assert [int(values.max()) for values in drawn[:3]] == [4, 2, 1]
    assert [values.dtype for values in drawn] == [torch.int64] * 3 + [torch.bool, torch.float64]
    wider = inputs.draw(["ids:99"], model, vocabulary=20, seed=0)
    assert isinstance(wider, tuple)
    assert int(wider[0].max()) > 9
    plain = inputs.draw(["a=ids:99"], nn.Linear(1, 1), vocabulary=None, seed=0)
    assert isinstance(plain, dict)
    assert int(plain["a"].max()) == 1


def test_an_example_input_that_raises(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("from torch import nn\nf = nn.Linear(2, 2)\ndef example_input():\n    return undefined\n")
    code, _, err = run("discover", f"{path}:f")
    assert code == ModelError.exit_code
    assert "example_input() raised NameError" in err
    assert "line 4: return undefined" in err


def test_usage_errors_have_their_own_code(run: Run) -> None:
    assert run("discover")[0] == 2
    assert run("discover", "a:b", "--seed", "x")[0] == 2
    assert run("unknown")[0] == 2


def test_a_bug_says_so_and_debug_shows_where(run: Run, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(discover_verb, "find", broken)
    arguments = ["discover", f"{models}:factory", "--input", "2x4"]
    code, _, err = run(*arguments)
    assert code == 1
    assert "please report it" in err
    assert "Traceback" not in err
    for position in (0, len(arguments)):
        assert "Traceback" in run(*arguments[:position], "--debug", *arguments[position:])[2]


def test_an_unwritable_output(run: Run, models: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ("discover", f"{models}:factory", "--input", "2x4", "--output")
    code, out, err = run(*words, tmp_path / "file" / "x.json")
    assert (code, out) == (7, "")
    assert "choose another place" in err
    assert run(*words, tmp_path / "new" / "x.json")[0] == 0
    code, out, err = run(*words, tmp_path / "new" / "x.json")
    assert (code, out) == (10, "")
    assert "give --force to replace it" in err
    assert run(*words, tmp_path / "new" / "x.json", "--force")[0] == 0


def test_a_closed_pipe_is_no_drama() -> None:
    command = f"{sys.executable} -m onebasin discover -h | true"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert result.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    command = f"{sys.executable} -m onebasin discover -h > /dev/full"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.returncode == 7
    assert result.stderr.strip().splitlines() == ["error: [Errno 28] No space left on device"]


def test_a_log_gets_a_line_with_the_time_left(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.01)
    with progress.progress_bar("working") as show:
        show(3, 12, "sweep 1")
        while "sweep 1, 3 of 12" not in (text := capsys.readouterr().err):  # another thread prints it
            time.sleep(0.005)
    assert text.startswith("working")
    with progress.progress("working"):
        pass
    assert capsys.readouterr().err == ""


def test_the_time_left_is_that_of_the_stage() -> None:
    """Done and time are known: what is left follows in proportion, from the beginning of the stage alone."""
    now = [0.0]
    stage = TimeLeft("aligning", clock=lambda: now[0])
    assert str(stage) == "aligning, 0 s"
    stage.show(10, 100, "sweep 1")
    now[0] = 30.0
    stage.show(40, 100, "sweep 1")
    assert str(stage) == "aligning: sweep 1, 40 of 100, 30 s, about 60 s left"
    stage.show(0, 100, "sweep 2")
    now[0] = 90.0
    assert str(stage) == "aligning: sweep 2, 0 of 100, 90 s"
    stage.show(50, 100, "sweep 2")
    assert str(stage).endswith("50 of 100, 90 s, about 60 s left")
    now[0] = 92.0
    stage.show(60, 100, "sweep 2")  # faster than the first half, which was slow to begin
    assert str(stage).endswith("about 8 s left")


def test_exit_codes_are_distinct() -> None:
    kinds = [OnebasinError, *OnebasinError.__subclasses__()]
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert not set(codes) & {0, 1, 2}


def test_loading_twice_gives_two_models(models: Path) -> None:
    assert load.load(f"{models}:factory").model is not load.load(f"{models}:factory").model
