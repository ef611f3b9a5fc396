"""The example programs give what NumPy gives."""

import numpy as np
import pytest
import vgpu
from vgpu.examples import nano_gpt, nano_gpt_reference, planted_race, suite

pytestmark = pytest.mark.xdist_group("examples")  # one process compiles them
SMALL = nano_gpt.Config(layers=1, width=32, heads=2, context=8, batch=2, vocabulary=20)


@pytest.mark.parametrize("name", suite.EXAMPLES)
def test_example(name):
    for check in suite.EXAMPLES[name]():
        assert check.error() <= check.tolerance


@pytest.mark.skipif(not vgpu.installed(), reason="a real GPU does not report races")
def test_planted_race_is_found():
    with pytest.raises(vgpu.VirtualGPUError) as caught:
        planted_race.main()
    assert caught.value.kind == "shared-memory race"
    assert caught.value.kernel == "racing_sum"
    assert "scratch[thread] += scratch[thread + half]" in str(caught.value)


@pytest.fixture(scope="module")
def batch():
    config = nano_gpt.Config()
    tokens, targets = np.random.default_rng(0).integers(
        0, config.vocabulary, (2, config.rows), np.int32)
    return config, nano_gpt.initial_parameters(config), tokens, targets


@pytest.fixture(scope="module")
def trained(batch):
    """The model after one step, and the loss before it."""
    config, parameters, tokens, targets = batch
    model = nano_gpt.NanoGPT(config, parameters)
    return model, model.step(tokens, targets)


def test_reference_gradients_are_slopes_of_the_loss():
    random = np.random.default_rng(1)
    tokens, targets = random.integers(0, SMALL.vocabulary, (2, SMALL.rows))
    parameters = nano_gpt.initial_parameters(SMALL).astype(np.float64)
    _, gradients = nano_gpt_reference.loss_and_gradients(SMALL, parameters, tokens, targets)
    step = 1e-5
    for name, shape in SMALL.shapes().items():
        direction = np.zeros_like(parameters)
        nano_gpt.views(direction, SMALL)[name][:] = random.standard_normal(shape)
        above, below = (
            nano_gpt_reference.loss_and_gradients(
                SMALL, parameters + sign * step * direction, tokens, targets)[0]
            for sign in (1, -1)
        )
        slope = (above - below) / (2 * step)
        assert slope == pytest.approx(gradients @ direction, rel=1e-5, abs=1e-9), name


def test_nano_gpt_loss_and_gradients(batch, trained):
    config, parameters, tokens, targets = batch
    model, loss = trained
    expected, gradients = nano_gpt_reference.loss_and_gradients(
        config, parameters, tokens, targets)
    assert abs(loss - expected) < 1e-5
    reference = nano_gpt.views(gradients, config)
    for name, got in nano_gpt.views(model.gradients.copy_to_host(), config).items():
        largest = np.abs(reference[name]).max()
        assert np.abs(got - reference[name]).max() < 1e-5 * largest, name


def test_nano_gpt_parameters_after_a_step(batch, trained):
    config, parameters, *_ = batch
    model, _ = trained
    gradients = model.gradients.copy_to_host().astype(np.float64)
    expected = nano_gpt_reference.adamw(config, parameters, gradients)
    assert np.abs(model.parameters.copy_to_host() - expected).max() < 1e-6


def test_nano_gpt_learns_the_same_way_every_time():
    tokens, targets = np.random.default_rng(0).integers(
        0, SMALL.vocabulary, (2, SMALL.rows), np.int32)

    def losses():
        model = nano_gpt.NanoGPT(SMALL, nano_gpt.initial_parameters(SMALL))
        return [model.step(tokens, targets, rate=1e-2) for _ in range(5)]

    first = losses()
    assert first == losses()
    assert first[-1] < first[0] - 0.5
