"""Rotary position against transformers, bit for bit, and its gradient."""

import math

import pytest
import torch
from transformers import GlmMoeDsaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaRotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fullspan.errors import ConfigError
from fullspan.ops.rope import op, reference
from fullspan.ops.rope.op import Yarn, apply_rope, inverse_frequencies, rope_angles, rope_into

POSITIONS = torch.tensor([0, 1, 2, 77, 4095, 131_071, 202_751, 1_048_575])
YARNS = [
    {"mscale": 1.0, "mscale_all_dim": 1.0},  # DeepSeek-V3.2
    {"mscale": 0.707, "mscale_all_dim": 1.3},
    {"mscale": 0.5},
    {"truncate": False, "beta_fast": 20, "beta_slow": 2},
    {"attention_factor": 1.5},
    {"original_max_position_embeddings": 6},  # a ramp of no width
    {"factor": 1.0},
]


def hugging_face(rope_dim: int, theta: float, yarn: dict | None = None) -> GlmMoeDsaRotaryEmbedding:
    rope = {"rope_theta": theta, "rope_type": "default"}
    if yarn is not None:
        rope = {"rope_theta": theta, "rope_type": "yarn"} | yarn
    config = GlmMoeDsaConfig(
        qk_rope_head_dim=rope_dim, rope_parameters=rope, max_position_embeddings=1 << 20
    )
    config.head_dim = rope_dim
    if yarn is not None:
        config.standardize_rope_params = lambda: None  # it would warn about factors
    return GlmMoeDsaRotaryEmbedding(config)


def as_yarn(settings: dict) -> Yarn:
    settings = dict(settings)
    length = settings.pop("original_max_position_embeddings")
    return Yarn(original_max_position=length, **settings)


@pytest.mark.parametrize("rope_dim", [2, 8, 64])
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0, 8_000_000])
def test_angles_equal_those_of_transformers(rope_dim, theta):
    theirs = hugging_face(rope_dim, theta)
    inv_freq, factor = inverse_frequencies(rope_dim, theta)
    assert torch.equal(inv_freq, theirs.inv_freq) and factor == 1.0
    cos, sin = rope_angles(POSITIONS, inv_freq, factor)
    expected = theirs(torch.zeros(1), POSITIONS[None])
    for ours, full in zip((cos, sin), expected, strict=True):
        assert torch.equal(ours, full[0, :, : rope_dim // 2])


@pytest.mark.parametrize("rope_dim", [8, 64])
@pytest.mark.parametrize("settings", YARNS)
def test_yarn_equals_that_of_transformers(rope_dim, settings):
    settings = {"factor": 40, "original_max_position_embeddings": 4096} | settings
    theirs = hugging_face(rope_dim, 10_000.0, settings)
    assert theirs.rope_type in ROPE_INIT_FUNCTIONS
    inv_freq, factor = inverse_frequencies(rope_dim, 10_000.0, as_yarn(settings))
    assert torch.equal(inv_freq, theirs.inv_freq) and factor == theirs.attention_scaling
    cos, sin = rope_angles(POSITIONS, inv_freq, factor)
    expected = theirs(torch.zeros(1), POSITIONS[None])
    assert torch.equal(cos, expected[0][0, :, : rope_dim // 2])
    assert torch.equal(sin, expected[1][0, :, : rope_dim // 2])


@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_equals_that_of_transformers(interleaved, heads):
    cos, sin = rope_angles(POSITIONS, *inverse_frequencies(8, 10_000.0))
    x = torch.randn(len(POSITIONS), *heads, 8)
    full = [torch.cat([angle, angle], 1)[None] for angle in (cos, sin)]
    four_d = x.view(1, len(POSITIONS), -1, 8)
    if interleaved:
        expected, _ = apply_rotary_pos_emb_interleave(four_d, four_d, *full, unsqueeze_dim=2)
        half_split = torch.cat([expected[..., :4, None], expected[..., 4:, None]], -1)
        expected = half_split.flatten(-2)  # theirs leaves the pairs apart, ours keeps them together
    else:
        expected, _ = apply_rotary_pos_emb(four_d, four_d, *full, unsqueeze_dim=2)
    out = apply_rope(x, cos, sin, interleaved=interleaved)
    assert torch.equal(out, expected.reshape(x.shape))


def test_conventions_differ_and_are_the_same_up_to_the_order_of_channels():
    cos, sin = rope_angles(POSITIONS, *inverse_frequencies(8, 10_000.0))
    x = torch.randn(len(POSITIONS), 8)
    apart = torch.cat([x[:, 0::2], x[:, 1::2]], 1)
    together = apply_rope(x, cos, sin, interleaved=True)
    out = apply_rope(apart, cos, sin, interleaved=False)
    assert torch.equal(out, torch.cat([together[:, 0::2], together[:, 1::2]], 1))
    assert not torch.allclose(together, apply_rope(x, cos, sin, interleaved=False))


def test_a_pair_is_turned_by_position_times_frequency():
    inv_freq, factor = inverse_frequencies(4, 100.0)
    cos, sin = rope_angles(torch.tensor([3]), inv_freq, factor)
    out = apply_rope(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), cos, sin, interleaved=True)
    expected = [math.cos(3), math.sin(3), -math.sin(0.3), math.cos(0.3)]
    torch.testing.assert_close(out[0], torch.tensor(expected))


@pytest.mark.parametrize("interleaved", [False, True])
def test_bfloat16_is_rounded_once(interleaved):
    cos, sin = rope_angles(POSITIONS, *inverse_frequencies(8, 10_000.0))
    x = torch.randn(len(POSITIONS), 2, 8).bfloat16()
    out = apply_rope(x, cos, sin, interleaved=interleaved)
    wide = apply_rope(x.float(), cos, sin, interleaved=interleaved)
    assert torch.equal(out, wide.bfloat16())


@pytest.mark.parametrize("interleaved", [False, True])
def test_views_need_no_copy(interleaved):
    cos, sin = rope_angles(POSITIONS, *inverse_frequencies(8, 10_000.0))
    x = torch.randn(len(POSITIONS), 2, 20)[..., 7:15]
    out = apply_rope(x, cos, sin, interleaved=interleaved)
    assert torch.equal(out, apply_rope(x.contiguous(), cos, sin, interleaved=interleaved))
    assert out.is_contiguous()


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient(interleaved):
    angle = torch.randn(5, 3, dtype=torch.float64)
    x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)

    def apply(x):
        return apply_rope(x, angle.cos(), angle.sin(), interleaved=interleaved)

    assert torch.autograd.gradcheck(apply, (x,))
    assert torch.autograd.gradgradcheck(apply, (x,))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_written_into_a_part_of_a_tensor_and_in_place(interleaved, inverse):
    cos, sin = rope_angles(POSITIONS, *inverse_frequencies(8, 10_000.0))
    x, room = torch.randn(len(POSITIONS), 2, 20), torch.zeros(len(POSITIONS), 2, 11)
    settings = {"interleaved": interleaved, "inverse": inverse}
    rope_into(x[..., 7:15], cos, sin, room[..., 3:], **settings)
    wanted = apply_rope(x[..., 7:15], cos, -sin if inverse else sin, interleaved=interleaved)
    assert torch.equal(room[..., 3:], wanted) and not room[..., :3].any()
    rope_into(x[..., 7:15], cos, sin, x[..., 7:15], **settings)
    assert torch.equal(x[..., 7:15], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_the_kernel_turns_as_the_reference_does(dtype, interleaved, inverse):
    """Widths and heads that are no power of two, rows of any stride; in place too."""
    device = pytest.importorskip("tests.support.triton_interpreter").DEVICE
    from fullspan.ops.rope import triton_backend

    cos, sin = (angle.to(device) for angle in rope_angles(POSITIONS, *inverse_frequencies(12, 1e4)))
    for x in (torch.randn(8, 5, 20)[..., 7:19], torch.randn(8, 5, 12), torch.randn(8, 12)):
        x = x.to(device, dtype)
        room = torch.full((*x.shape[:-1], 13), torch.nan, dtype=dtype, device=device)
        wanted = torch.empty_like(x)
        reference.rotate(x, cos, sin, interleaved, inverse, wanted)
        triton_backend.rotate(x, cos, sin, interleaved, inverse, room[..., 1:])
        close = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 2e-3}
        torch.testing.assert_close(room[..., 1:], wanted, **close)
        assert room[..., 0].isnan().all()
        triton_backend.rotate(x, cos, sin, interleaved, inverse, x)
        torch.testing.assert_close(x, wanted, **close)


def test_no_rows():
    cos, sin = rope_angles(torch.arange(0), *inverse_frequencies(8, 10_000.0))
    assert apply_rope(torch.zeros(0, 2, 8), cos, sin, interleaved=True).shape == (0, 2, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inverse", [False, True])
def test_operator_registration(dtype, inverse):
    cos, sin = rope_angles(POSITIONS, *inverse_frequencies(8, 10_000.0))
    for x in (torch.randn(8, 3, 8), torch.randn(8, 8), torch.randn(8, 3, 12)[..., :8]):
        x = x.to(dtype).requires_grad_()
        torch.library.opcheck(op._rope, (x, cos, sin, True, inverse, "reference"))
        x = x.detach()
        given = (torch.empty_like(x), x, cos, sin, True, inverse, "reference")
        torch.library.opcheck(op._rope_into, given)


@pytest.mark.parametrize("rope_dim", [0, 7, -2])
def test_a_width_that_has_no_pairs(rope_dim):
    with pytest.raises(ConfigError, match=f"rotary width is {rope_dim}; .* positive even"):
        inverse_frequencies(rope_dim, 10_000.0)


@pytest.mark.parametrize(("factor", "length"), [(0.5, 4096), (40.0, 0)])
def test_yarn_that_shrinks(factor, length):
    with pytest.raises(ConfigError, match=f"factor of {factor} over {length} positions"):
        Yarn(factor=factor, original_max_position=length)
