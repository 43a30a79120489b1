import pytest
import torch

from multigpu_cli.data.transforms import MODES, Standardised, fit_standardised, model_input_shape
from multigpu_cli.errors import RequestError

BATCH = torch.randn(50, 3, 4, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 0.1]).view(
    3, 1, 1
)


def test_every_channel_has_mean_0_and_deviation_1_and_keeps_its_place():
    met = fit_standardised(BATCH, "flatten")(BATCH)
    assert met.shape == BATCH.shape
    torch.testing.assert_close(met.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(met.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_average_is_the_mean_of_the_standardised_channels_and_first_the_first_of_them():
    flat = fit_standardised(BATCH, "flatten")(BATCH)
    torch.testing.assert_close(fit_standardised(BATCH, "average")(BATCH), flat.mean(1, keepdim=True))
    torch.testing.assert_close(fit_standardised(BATCH, "first")(BATCH), flat[:, :1])


@pytest.mark.parametrize("mode", MODES)
def test_the_announced_shape_is_the_one_that_comes_out(mode):
    assert fit_standardised(BATCH, mode)(BATCH).shape[1:] == model_input_shape(BATCH.shape[1:], mode)


def test_bytes_are_standardised_like_the_floats_they_stand_for():
    pixels = (BATCH * 20 + 128).clamp(0, 255).to(torch.uint8)
    torch.testing.assert_close(
        fit_standardised(pixels, "flatten")(pixels), fit_standardised(pixels.float(), "flatten")(pixels)
    )


def test_a_constant_channel_gives_zeros_not_infinity():
    constant = torch.full((5, 1, 4), 7, dtype=torch.uint8)
    assert fit_standardised(constant, "flatten")(constant).eq(0).all()


def test_vectors_are_standardised_per_entry():
    vectors = torch.randn(200, 4) * 3 + 1
    torch.testing.assert_close(fit_standardised(vectors, "flatten")(vectors).mean(0), torch.zeros(4), atol=1e-5, rtol=0)


def test_a_sample_is_met_alike_in_any_batch():
    prepare = Standardised((0.1, 0.2, 0.3), (1.0, 2.0, 3.0), "average")
    assert torch.equal(prepare(BATCH)[7:9], prepare(BATCH[7:9]))


def test_a_mode_that_does_not_exist_and_channels_that_do_not_are_refused():
    with pytest.raises(RequestError, match=r"--mode.*avrage") as refused:
        model_input_shape((3, 8, 8), "avrage")
    assert "average" in refused.value.remedy
    with pytest.raises(RequestError, match="--mode first needs samples with channels"):
        model_input_shape((20,), "first")
