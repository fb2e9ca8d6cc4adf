"""Random changes of mini-batches: against loops over examples, against laws, and through whole runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError
from onebasin.inference import Draws, MiniBatch, StepIndex, driver
from onebasin.inference.augment import transforms_of
from onebasin.inference.seeds import Streams, generator
from onebasin.inference.start import fresh
from onebasin.inference.target import Minibatches, target_of
from onebasin.inference.training import pass_options
from tests.judging import Z, numbers, seeded

CHAINS, COUNT, SIDE = 2, 60, 6
IMAGES = numbers(CHAINS, COUNT, 3, SIDE, SIDE)
CLASSES = torch.randint(0, 4, (CHAINS, COUNT), generator=seeded(1))


def streams() -> list[torch.Generator]:
    return [seeded(chain) for chain in range(CHAINS)]


def windows(image: Tensor, padding: int, fill: float) -> list[Tensor]:
    padded = F.pad(image, (padding,) * 4, value=fill)
    reach, (height, width) = range(2 * padding + 1), image.shape[-2:]
    return [padded[:, down : down + height, right : right + width] for down in reach for right in reach]


@pytest.mark.parametrize(("padding", "fill"), [(1, 0.0), (2, -3.5)])
def test_every_crop_is_a_window_of_its_padded_image_and_all_windows_occur(padding: int, fill: float) -> None:
    crop, seen = ob.RandomCrop(padding, fill), torch.zeros((2 * padding + 1) ** 2)
    for seed in range(6):
        after = crop.apply(MiniBatch([IMAGES], CLASSES), [seeded(10 * seed + chain) for chain in range(CHAINS)])
        assert torch.equal(after.targets, CLASSES) and after.inputs[0].shape == IMAGES.shape
        for found, image in zip(after.inputs[0].flatten(0, 1), IMAGES.flatten(0, 1), strict=True):
            place = [number for number, one in enumerate(windows(image, padding, fill)) if torch.equal(one, found)]
            assert len(place) == 1
            seen[place[0]] += 1
    assert stats.chisquare(seen.numpy()).pvalue > 1e-5


def test_images_of_one_example_get_the_same_window_and_the_same_flip() -> None:
    for transform in (ob.RandomCrop(2), ob.RandomFlip()):
        after = transform.apply(MiniBatch([IMAGES, 2 * IMAGES, numbers(CHAINS, COUNT, 5)], CLASSES), streams())
        assert torch.equal(after.inputs[1], 2 * after.inputs[0]) and not torch.equal(after.inputs[0], IMAGES)
        assert torch.equal(after.inputs[2], numbers(CHAINS, COUNT, 5))


def pairs(a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(a.flatten(0, 1), b.flatten(0, 1), strict=True))


def test_flips_turn_half_of_the_images_and_what_belongs_to_their_pixels() -> None:
    labels = IMAGES[:, :, 0].round().long()
    after = ob.RandomFlip().apply(MiniBatch([IMAGES], labels), streams())
    flipped = [torch.equal(found, image.flip(-1)) for found, image in pairs(after.inputs[0], IMAGES)]
    assert [torch.equal(found, image) for found, image in pairs(after.inputs[0], IMAGES)] == [
        not one for one in flipped
    ]
    assert [torch.equal(found, own.flip(-1)) for found, own in pairs(after.targets, labels)] == flipped
    assert abs(sum(flipped) - CHAINS * COUNT / 2) < Z * (CHAINS * COUNT / 4) ** 0.5
    assert torch.equal(ob.RandomFlip(1.0).apply(MiniBatch([IMAGES], CLASSES), streams()).inputs[0], IMAGES.flip(-1))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_mixtures_are_of_examples_of_one_mini_batch_with_shares_of_the_beta_law(alpha: float) -> None:
    shares = []
    for seed in range(100):
        own = [seeded(CHAINS * seed + chain) for chain in range(CHAINS)]
        after = ob.Mixup(alpha).apply(MiniBatch([IMAGES], CLASSES), own)
        assert after.share is not None and after.partners is not None and after.share.shape == CLASSES.shape
        assert torch.equal(after.targets, CLASSES)
        shares += [float(one) for one in after.share[:, 0]]
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 1e-4
    s = after.share[:, :, None, None, None]
    others = (after.inputs[0] - s * IMAGES) / (1 - s)
    for chain in range(CHAINS):
        distance = torch.cdist(others[chain].flatten(1), IMAGES[chain].flatten(1))
        order = distance.argmin(1)
        assert float(distance.amin(1).max()) < 1e-6 and sorted(order.tolist()) == list(range(COUNT))
        assert torch.equal(after.partners[chain], CLASSES[chain][order])


def classifier() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 4)).double()


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_a_mixture_is_judged_by_both_targets(kind: str) -> None:
    """For classes it is the cross-entropy with soft targets of torch; for numbers the mixture of two log densities."""
    x, model = IMAGES.flatten(0, 1), classifier()
    y = CLASSES.flatten() if kind == "categorical" else numbers(len(x), 4, seed=3)
    target = target_of(model, (x, y), prior=None, noise=None if kind == "categorical" else 0.7)
    transforms = transforms_of(("flip", "mixup"))
    position = target.layout.join({name: value[None] for name, value in model.named_parameters()}).detach()
    rows = torch.arange(10)[None]
    streams = Streams(5, [0], 0)
    batch = pass_options(transforms, False, 0, streams)["change"](MiniBatch([x[rows]], y[rows]))
    found = target(position, {}, rows, training=True, **pass_options(transforms, False, 0, streams))
    model.requires_grad_(True)
    outputs, share = model(batch.inputs[0][0]), batch.share[0]  # type: ignore[index]
    first, second = batch.targets[0], batch.partners[0]  # type: ignore[index]
    if kind == "categorical":
        soft = share[:, None] * F.one_hot(first, 4) + (1 - share)[:, None] * F.one_hot(second, 4)
        loss = F.cross_entropy(outputs, soft, reduction="sum")
    else:
        law = torch.distributions.Normal(outputs, 0.7)
        loss = -(share * law.log_prob(first).sum(1) + (1 - share) * law.log_prob(second).sum(1)).sum()
    loss = loss * len(x) / 10
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(found.potential[0], loss.detach(), rtol=1e-10, atol=1e-10)
    expected = torch.cat([slope.reshape(-1) for slope in slopes])
    torch.testing.assert_close(found.gradient[0], expected, rtol=1e-10, atol=1e-10)


def test_a_member_is_what_a_plain_loop_with_crops_and_flips_trains() -> None:
    """Only the mini-batches of training are changed, each chain with numbers of its own (seed, chain, step)."""
    x, y = IMAGES[0], CLASSES[0]
    transforms, epochs, seed = transforms_of(["crop", ob.RandomFlip(0.3)]), 4, 9
    method = ob.Ensemble(epochs=epochs, batch=8, optimizer="sgd", lr=0.1, augment=transforms)
    found = ob.sample(classifier(), (x, y), method, chains=2, prior=None, seed=seed, compile=False)
    batches = Minibatches(len(x), 8)
    for chain in range(2):
        model = classifier()
        model.load_state_dict(fresh(model, seed, chain))
        steps = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(epochs * batches.per_epoch):
            rows = batches.rows(step, Streams(seed, [chain], 0))
            assert rows is not None
            batch, own = MiniBatch([x[rows]], y[rows]), [generator(seed, "augment", chain, step)]
            for transform in transforms:
                batch = transform.apply(batch, own)
            steps.zero_grad()
            F.cross_entropy(model(batch.inputs[0][0]), batch.targets[0]).backward()
            steps.step()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(found.tensor(key)[chain], value, rtol=1e-9, atol=1e-9)
        density = -F.cross_entropy(model(x), y, reduction="sum").detach()
        torch.testing.assert_close(found.log_density[chain], density, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------- all at once: the same bits


PAPERS = ob.Ensemble(
    epochs=9, batch=8, optimizer="sgd", lr=0.1, nesterov=True, weight_decay=1e-3, lr_schedule="milestones",
    milestones=(3, 6), lr_warmup=2, augment=("crop", "flip", "mixup"), precision="bf16",
)  # fmt: skip


def papers(method: ob.Method = PAPERS, **options: Any) -> ob.Population:
    """As the papers train, on 60 images: 7 steps in an epoch, so that blocks of 20 steps end within epochs."""
    with ob.global_seed(0):
        model = ob.examples.resnet8(2, classes=4)
    data = (IMAGES[0].float(), CLASSES[0])
    defaults: dict[str, Any] = {"chains": 3, "chains_per_batch": 2, "seed": 4, "prior": None, "compile": False}
    return ob.sample(model, data, method, **{**defaults, **options})


def same(a: ob.Population, b: ob.Population) -> bool:
    names = all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.names)
    return names and torch.equal(torch.as_tensor(a.log_density), torch.as_tensor(b.log_density))


@pytest.fixture(scope="module")
def whole() -> ob.Population:
    return papers()


def test_interrupted_within_an_epoch_it_trains_the_same(
    whole: ob.Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_CHECKPOINT_SECONDS", 0.0)
    stopped = []

    def stop(done: int, total: int, text: str) -> None:
        if done >= 40 and not stopped:
            stopped.append(done)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        papers(path=tmp_path / "run", progress=stop)
    assert stopped[0] % 7, "within an epoch"
    began: list[int] = []
    assert same(papers(path=tmp_path / "run", progress=lambda done, total, text: began.append(done)), whole)
    assert began[0] == 20, "it went on from the checkpoint"
    with pytest.raises(InputError, match="another augment"):
        papers(ob.Ensemble(**{**vars(PAPERS), "augment": ("flip",)}), path=tmp_path / "run")


def test_workers_and_chunks_train_the_same(whole: ob.Population, tmp_path: Path) -> None:
    assert same(papers(path=tmp_path / "run", workers=2, chunk=1), whole)  # one chain in each batch


def test_variational_inference_changes_examples_for_each_sample_of_weights() -> None:
    """The gradient is the mean over what plain passes give, each draw of weights with examples of its own."""
    x, y = IMAGES[0], CLASSES[0]
    target = target_of(classifier(), (x, y), prior=1.0)
    method = ob.VI(samples=2, batch=8, augment=("crop",), init_std=0.1)
    kernel: Any = method.plan(target).stages[0].kernel
    start = Draws(numbers(2, target.layout.size), {}, torch.zeros(2))
    streams = Streams(3, [4, 5], "b")
    state = kernel.init(start, streams)
    noise = streams.gaussian("weights", state.mean[:, None].expand(-1, 2, -1))
    after, _ = kernel.step(state, StepIndex(6, 100), Streams(3, [4, 5], "b"))
    rows, theta = kernel.minibatches.rows(6, streams), state.mean[:, None] + 0.1 * noise
    slopes = []
    for place, chain in enumerate((4, 5)):
        own, each = generator(3, "augment", chain, 6), []
        chosen = rows[place]
        both = [MiniBatch([x[chosen][None]], y[chosen][None]) for _ in range(2)]
        for sample, batch in enumerate(ob.RandomCrop().apply(one, [own]) for one in both):
            alone = target_of(classifier(), (batch.inputs[0][0], batch.targets[0]), prior=None)
            each.append(alone(theta[place, sample][None], {}).gradient[0] * len(x) / 8)
        slopes.append((torch.stack(each).mean(0) + state.mean[place]) / len(x))
    expected = 0.1 * torch.stack(slopes)  # the first moment of Adam after one step
    torch.testing.assert_close(after.first[:, : target.layout.size], expected, rtol=1e-9, atol=1e-12)


def test_checkpoints_of_an_augmented_training_are_shorter_trainings() -> None:
    options: dict[str, Any] = {"batch": 8, "lr": 0.01, "augment": ("crop", "mixup")}
    several = papers(ob.Ensemble(epochs=4, draws=2, every=1, **options), chains=1)
    one = papers(ob.Ensemble(epochs=4, **options), chains=1)
    assert torch.equal(several.tensor("conv1.weight")[:1], one.tensor("conv1.weight"))


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("augment", "data", "message"),
    [
        ("crop", (IMAGES[0].flatten(1), CLASSES[0]), r"expected images .* for crop, found inputs of shape \(60, 108\)"),
        ("flip", (IMAGES[0].flatten(1), CLASSES[0]), "or leave flip out of augment"),
        ("crop", (IMAGES[0], IMAGES[0]), "padded pixels have no target"),
    ],
)
def test_data_that_cannot_be_changed_so_are_refused(augment: str, data: tuple[Tensor, Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ob.Ensemble(augment=(augment,), batch=8).plan(_target(data))


def _target(data: tuple[Tensor, Tensor]) -> Any:
    wide = nn.Sequential(nn.Conv2d(3, 3, 1)) if data[1].dim() > 1 else nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    return target_of(wide.double(), data, noise=1.0 if data[1].dim() > 1 else None)


def test_token_ids_are_not_mixed_and_whole_data_are_not_changed() -> None:
    ids = torch.randint(0, 5, (20, 6), generator=seeded(2))
    words = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(18, 4))
    with pytest.raises(InputError, match="expected real inputs for mixup"):
        ob.Ensemble(augment=("mixup",), batch=8).plan(target_of(words, (ids, CLASSES[0, :20])))
    with pytest.raises(InputError, match="expected mini-batches to augment, found all 60 examples"):
        ob.Ensemble(augment=("mixup",), batch=None).plan(_target((IMAGES[0], CLASSES[0])))


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (("corp",), r"transforms in augment out of crop, flip, mixup, .* found 'corp'"),
        ((ob.Mixup,), "found <class"),
        (("mixup", ob.Mixup(1.0)), "expected mixup once"),
    ],
)
def test_what_is_no_transform_is_refused(augment: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ob.Ensemble(augment=augment)


@pytest.mark.parametrize(
    "make", [lambda: ob.RandomCrop(0), lambda: ob.RandomFlip(1.5), lambda: ob.Mixup(0.0), lambda: ob.RandomCrop(True)]
)
def test_wrong_options_of_transforms_are_refused(make: Any) -> None:
    with pytest.raises(InputError, match="give"):
        make()


def test_words_and_objects_are_the_same_method() -> None:
    assert ob.Ensemble(augment=("crop", "flip")) == ob.Ensemble(augment=[ob.RandomCrop(), ob.RandomFlip()])  # type: ignore[arg-type]
