"""JAX arrays: values, gradients, jit, vmap, packed sequences and errors, beside PyTorch's."""

import os

import fa3
import numpy
import pytest
import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too
jax = pytest.importorskip("jax")
import fa3.jax  # noqa: E402


@pytest.fixture(autouse=True)
def placed(request):
    """Arrays go to the test's device, which is the CPU's where it names none."""
    device = getattr(request.node, "callspec", None) and request.node.callspec.params.get("device")
    try:
        with jax.default_device(jax.devices(device or "cpu")[0]):
            yield
    except RuntimeError as error:
        pytest.skip(f"JAX has no GPU here: {error}")


def arrays(*shapes):
    generator = numpy.random.default_rng(3)
    return [generator.standard_normal(shape, dtype=numpy.float32) for shape in shapes]


def both(device, *arrays):
    """As JAX's arrays and as PyTorch's tensors, of a dtype that the device has."""
    if device == "cpu":
        return arrays, [torch.from_numpy(array) for array in arrays]
    ours = [jax.numpy.asarray(array).astype("bfloat16") for array in arrays]
    return ours, [torch.from_numpy(array).to(device, torch.bfloat16) for array in arrays]


def compare(device, found, wanted):
    found, wanted = numpy.asarray(found, numpy.float32), wanted.detach().float().cpu().numpy()
    tolerance = 1e-5 if device == "cpu" else 1e-2
    numpy.testing.assert_allclose(
        found, wanted, rtol=10 * tolerance, atol=tolerance * abs(wanted).max()
    )


def test_gradients(device):
    *three, sink, weights = arrays((2, 9, 4, 32), (2, 12, 2, 32), (2, 12, 2, 32), (4,), (2, 4, 9))
    (q, k, v, sink), leaves = both(device, *three, sink)

    def loss(q, k, v, sink):
        output, lse = fa3.jax.attention(
            q, k, v, causal=True, window=(7, 0), softcap=5.0, sink=sink, return_lse=True
        )
        return (output**2).sum() + (lse * weights).sum()

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, sink)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    output, lse = fa3.flash_attn_func(
        *leaves[:3],
        causal=True,
        window_size=(7, 0),
        softcap=5.0,
        s_aux=leaves[3],
        return_softmax_lse=True,
    )
    wanted = output.square().sum() + (lse * torch.from_numpy(weights).to(lse.device)).sum()
    wanted.backward()
    compare(device, value, wanted)
    for found, leaf in zip(gradients, leaves):
        compare(device, found, leaf.grad)


def test_bfloat16_and_vmap(device):
    q, k, v = (jax.numpy.asarray(a).astype("bfloat16") for a in arrays(*[(3, 2, 8, 2, 32)] * 3))
    found = jax.vmap(fa3.jax.attention)(q, k, v)
    assert found.dtype == "bfloat16"
    for i in range(3):
        assert (found[i] == fa3.jax.attention(q[i], k[i], v[i])).all()


def test_packed(device):
    three, tensors = both(device, *arrays(*[(20, 2, 16)] * 3))
    starts, used = numpy.array([0, 8, 20], numpy.int32), numpy.array([8, 5], numpy.int32)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "seqused_q": used}
    longest = {"max_seqlen_q": 12, "max_seqlen_k": 12}

    def function(q, k, v):
        return fa3.jax.attention(q, k, v, **lengths, **longest)

    output = jax.jit(function)(*three)
    on_device = {name: torch.from_numpy(array).to(device) for name, array in lengths.items()}
    compare(device, output, fa3.flash_attn_varlen_func(*tensors, **on_device, **longest))
    gradients = jax.grad(lambda *three: function(*three).sum(), argnums=(0, 1))(*three)
    for array in (output, gradients[0]):
        array = numpy.asarray(array, numpy.float32)
        assert not array[13:].any() and array[:13].any() and numpy.isfinite(array).all()


def test_padding(device):
    """Keys that don't count, by a name of fa3.h."""
    (q, k, v), _ = both(device, *arrays(*[(2, 9, 2, 32)] * 3))
    padding = numpy.array([4, 0], numpy.int32)

    def function(q, k, v):
        return fa3.jax.attention(q, k, v, leftpad_k=padding)[:1]

    alone = numpy.array(fa3.jax.attention(q[:1], k[:1, 4:], v[:1, 4:]), numpy.float32)
    compare(device, function(q, k, v), torch.from_numpy(alone))
    gradients = jax.grad(lambda *three: function(*three).sum(), argnums=(1, 2))(q, k, v)
    for gradient in gradients:
        assert not gradient[0, :4].any() and gradient[0, 4:].any()


def test_numbers_of_any_type():
    q, k, v = arrays(*[(1, 8, 2, 32)] * 3)
    wanted = fa3.jax.attention(q, k, v, softcap=3.0, window=(4, 0))
    for softcap in (3, numpy.float64(3), jax.numpy.float32(3)):
        found = fa3.jax.attention(q, k, v, softcap=softcap, window=(numpy.int32(4), 0))
        assert (found == wanted).all()
    with pytest.raises(OverflowError, match="softcap"):
        fa3.jax.attention(q, k, v, softcap=1e-50)


def test_errors():
    q, k, v = arrays(*[(1, 8, 2, 32)] * 3)
    with pytest.raises(Exception, match="value"):
        fa3.jax.attention(q, k, v[:, :5]).block_until_ready()
    with pytest.raises(Exception, match="dtype"):
        fa3.jax.attention(*(a.astype(numpy.int8) for a in (q, k, v))).block_until_ready()
    with pytest.raises(ValueError, match="phase"):
        fa3._core.xla_handler("sideways", False)
    with pytest.raises(NotImplementedError):
        fa3._core.xla_handler("append", True)
