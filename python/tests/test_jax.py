"""JAX arrays: values, gradients, jit, vmap, packed sequences and errors, beside PyTorch's."""

import fa3
import numpy
import pytest
import torch

jax = pytest.importorskip("jax")
import fa3.jax  # noqa: E402


def arrays(*shapes):
    generator = numpy.random.default_rng(3)
    return [generator.standard_normal(shape, dtype=numpy.float32) for shape in shapes]


def test_gradients():
    q, k, v, sink, weights = arrays((2, 9, 4, 32), (2, 12, 2, 32), (2, 12, 2, 32), (4,), (2, 4, 9))

    def loss(q, k, v, sink):
        output, lse = fa3.jax.attention(
            q, k, v, causal=True, window=(7, 0), softcap=5.0, sink=sink, return_lse=True
        )
        return (output**2).sum() + (lse * weights).sum()

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, sink)
    leaves = [torch.from_numpy(array).requires_grad_() for array in (q, k, v, sink)]
    output, lse = fa3.flash_attn_func(
        *leaves[:3],
        causal=True,
        window_size=(7, 0),
        softcap=5.0,
        s_aux=leaves[3],
        return_softmax_lse=True,
    )
    wanted = output.square().sum() + (lse * torch.from_numpy(weights)).sum()
    wanted.backward()
    numpy.testing.assert_allclose(value, wanted.item(), rtol=1e-5)
    for found, leaf in zip(gradients, leaves):
        numpy.testing.assert_allclose(found, leaf.grad, rtol=1e-4, atol=1e-5)


def test_bfloat16_and_vmap():
    q, k, v = (jax.numpy.asarray(a).astype("bfloat16") for a in arrays(*[(3, 2, 8, 2, 32)] * 3))
    found = jax.vmap(fa3.jax.attention)(q, k, v)
    assert found.dtype == "bfloat16"
    for i in range(3):
        assert (found[i] == fa3.jax.attention(q[i], k[i], v[i])).all()


def test_packed():
    q, k, v = arrays(*[(20, 2, 16)] * 3)
    starts, used = numpy.array([0, 8, 20], numpy.int32), numpy.array([8, 5], numpy.int32)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "seqused_q": used}
    output = numpy.asarray(jax.jit(lambda *t: fa3.jax.attention(*t, **lengths))(q, k, v))
    assert numpy.array_equal(output, fa3.attention(q, k, v, **lengths)) and not output[13:].any()
    gradient = jax.grad(lambda q: fa3.jax.attention(q, k, v, **lengths).sum())(q)
    assert not numpy.asarray(gradient)[13:].any() and numpy.asarray(gradient)[:13].any()


def test_errors():
    q, k, v = arrays(*[(1, 8, 2, 32)] * 3)
    with pytest.raises(Exception, match="value"):
        fa3.jax.attention(q, k, v[:, :5]).block_until_ready()
    with pytest.raises(Exception, match="dtype"):
        fa3.jax.attention(*(a.astype(numpy.int8) for a in (q, k, v))).block_until_ready()
    with pytest.raises(ValueError, match="phase"):
        fa3._core.xla_handler("sideways")
    with pytest.raises(NotImplementedError):
        fa3._core.xla_handler("append")
