"""The time from a Python call to the kernel's launch: libfa3's functions beside a stand-in for the
official package's way (an autograd.Function over a torch.library.custom_op over a C++ operator of 34
arguments that only makes its results), and beside PyTorch's scaled_dot_product_attention.

    python python/bench/overhead.py [cuda]

The batch is empty, so no kernel runs. Times are the thread's own processor time, the least of many
rounds. Needs the package fa3, PyTorch with its headers, g++ and ninja."""

import json
import platform
import sys
import time

import fa3
import torch
import torch.nn.functional as F
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <torch/library.h>
#include <torch/torch.h>
using at::Tensor;
using std::optional;
using Option = optional<Tensor>;
std::tuple<Tensor, Tensor, Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, Option, Option, Option,
    Option out, Option, Option, Option, Option, Option, optional<int64_t>, optional<int64_t>, Option,
    Option, Option, Option, Option, Option, Option, Option, Option, optional<double>, bool, int64_t,
    int64_t, int64_t, double, bool, Option, int64_t, optional<bool>, int64_t) {
  Tensor output = torch::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  Tensor lse = torch::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat));
  return {output, lse, Tensor(), Tensor()};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd(Tensor dout, Tensor q, Tensor k, Tensor v,
    Tensor out, Tensor lse, Option dq, Option dk, Option dv, Option, Option, Option, Option,
    optional<int64_t>, optional<int64_t>, optional<double>, bool, int64_t, int64_t, double, bool,
    int64_t) {
  // softmax_d, softmax_lse_log2, dq_accum, dq_semaphore
  Tensor rows[4];
  for (Tensor &row : rows)
    row = torch::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat));
  return {rows[0], rows[1], rows[2], Tensor(), Tensor()};
}
#define OPTIONAL "Tensor? "
TORCH_LIBRARY(stand_in, m) {
  m.def("fwd(Tensor q, Tensor k, Tensor v, Tensor(a!)? a3, Tensor(b!)? a4, Tensor? a5, "
        "Tensor(c!)? a6, Tensor? a7, Tensor? a8, Tensor? a9, Tensor? a10, Tensor? a11, int? a12, "
        "int? a13, Tensor? a14, Tensor? a15, Tensor? a16, Tensor? a17, Tensor? a18, Tensor? a19, "
        "Tensor? a20, Tensor? a21, Tensor? a22, float? a23, bool a24, int a25, int a26, int a27, "
        "float a28, bool a29, Tensor? a30, int a31, bool? a32, int a33) "
        "-> (Tensor(c!), Tensor, Tensor, Tensor)");
  m.def("bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!)? dq, "
        "Tensor(b!)? dk, Tensor(c!)? dv, Tensor? a9, Tensor? a10, Tensor? a11, Tensor? a12, "
        "int? a13, int? a14, float? a15, bool a16, int a17, int a18, float a19, bool a20, int a21) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.impl("fwd", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(fwd)));
  m.impl("fwd", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(fwd)));
  m.impl("bwd", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(bwd)));
  m.impl("bwd", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(bwd)));
}
"""


def stand_in():
    """A function like the official flash_attn_func, whose kernels do nothing."""
    load_inline("stand_in", SOURCE, is_python_module=False)
    Tensor, Option = torch.Tensor, torch.Tensor | None
    tail = [0.125, False, -1, -1, 0, 0.0, True, None, 1, None, 0]
    schema = (
        "(Tensor q, Tensor k, Tensor v, "
        + "".join(f"Tensor? a{i}, " for i in range(3, 12))
        + "int? a12, int? a13, "
        + "".join(f"Tensor? a{i}, " for i in range(14, 23))
        + "float? a23, bool a24, int a25, int a26, int a27, float a28, bool a29, Tensor? a30, "
        "int a31, bool? a32, int a33) -> (Tensor, Tensor, Tensor, Tensor)"
    )

    def last_contiguous(tensor):
        return tensor.contiguous() if tensor is not None and tensor.stride(-1) != 1 else tensor

    def forward(q, k, v, *rest):
        tensors = [last_contiguous(t) for t in (q, k, v, *rest[:9], *rest[11:17])]
        output, lse, *empty = torch.ops.stand_in.fwd(*tensors[:3], *rest)
        return output, lse, *(torch.tensor([], device=q.device) for _ in empty)

    forward = torch.library.custom_op(
        "stand_in::forward", forward, mutates_args=(), schema=schema
    )

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, a6: Option,
        a7: Option, a8: Option, a9: Option, a10: int | None, a11: int | None, dq: Option,
        dk: Option, dv: Option, scale: float | None, causal: bool, left: int, right: int,
        softcap: float, deterministic: bool, margin: int,
    ) -> Tensor:  # fmt: skip
        dout, q, k, v, out = (last_contiguous(t) for t in (dout, q, k, v, out))
        rest = (scale, causal, left, right, softcap, deterministic, margin)
        rows, *_ = torch.ops.stand_in.bwd(
            dout, q, k, v, out, lse, dq, dk, dv, a6, a7, a8, a9, a10, a11, *rest
        )
        return rows

    backward = torch.library.custom_op(
        "stand_in::backward", backward, mutates_args=("dq", "dk", "dv")
    )

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, scale, causal, *options):
            output, lse, *_ = forward(q, k, v, *(None,) * 20, *tail)
            ctx.save_for_backward(q, k, v, output, lse)
            return output

        @staticmethod
        def backward(ctx, dout, *_):
            q, k, v, output, lse = ctx.saved_tensors
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            lengths = (None,) * 6
            scalars = (0.125, False, -1, -1, 0.0, False, 0)
            backward(dout, q, k, v, output, lse, *lengths, dq, dk, dv, *scalars)
            return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]], *(None,) * 14

    return lambda q, k, v: Function.apply(q, k, v, *(None,) * 14)


def microseconds(function, calls=400, rounds=40):
    for _ in range(calls):
        function()
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            function()
        best = min(best, (time.thread_time() - start) / calls)
    return round(best * 1e6, 2)


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    official = stand_in()
    shape = (0, 64, 4, 64)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]

    def sdpa(q, k, v):
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first).transpose(1, 2)

    result = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "microseconds": {},
    }
    for name, function in (("fa3", fa3.flash_attn_func), ("official", official), ("sdpa", sdpa)):
        backward = [function(*leaves) for _ in range(1)]
        grad = torch.ones_like(backward[0])
        result["microseconds"][name] = {
            "forward": microseconds(lambda: function(q, k, v)),
            "forward for training": microseconds(lambda: function(*leaves)),
            "forward and backward": microseconds(
                lambda: torch.autograd.grad(function(*leaves), leaves, grad)
            ),
        }
    print(json.dumps(result, indent=2))


main()
