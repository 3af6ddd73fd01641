"""fa3_forward and fa3_backward on torch tensors, through the C ABI: enough for the benchmarks."""

import ctypes

import torch

DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.int32: 32}
CAUSAL, WINDOW, DETERMINISTIC = 1, 2, 16
CUDA = 1


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
        ("reserved", ctypes.c_uint64 * 6),
    ]


TENSORS = """query key value output lse sink cu_seqlens_q cu_seqlens_k seqused_q seqused_k
    leftpad_k cache_batch_index diagonal""".split()


GRADIENT_TENSORS = """query key value output lse grad_output grad_query grad_key grad_value grad_lse
    sink grad_sink cu_seqlens_q cu_seqlens_k seqused_q seqused_k leftpad_k diagonal""".split()


def args_fields(tensors):
    return [
        ("struct_size", ctypes.c_size_t),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        *[(name, Tensor) for name in tensors],
        ("max_seqlen_q", ctypes.c_int64),
        ("max_seqlen_k", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
    ]


class ForwardArgs(ctypes.Structure):
    _fields_ = args_fields(TENSORS)


class BackwardArgs(ctypes.Structure):
    _fields_ = args_fields(GRADIENT_TENSORS)


class DeviceInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char * 128),
        ("level", ctypes.c_char * 32),
        ("units", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("memory_bytes", ctypes.c_uint64),
    ]


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


def describe(field, tensor):
    field.data, field.dtype, field.rank = tensor.data_ptr(), DTYPES[tensor.dtype], tensor.dim()
    field.shape[: tensor.dim()] = tensor.shape
    field.strides[: tensor.dim()] = tensor.stride()


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.fa3_last_error.restype = ctypes.c_char_p
        self.lib.fa3_version.restype = ctypes.c_char_p
        self.lib.fa3_get_device_info.argtypes = [Device, ctypes.POINTER(DeviceInfo)]

    def check(self, status):
        if status:
            raise RuntimeError(self.lib.fa3_last_error().decode())

    def version(self):
        return self.lib.fa3_version().decode()

    def cpu(self):
        """The processor's name and the level that calls run on."""
        info = DeviceInfo(struct_size=ctypes.sizeof(DeviceInfo))
        self.check(self.lib.fa3_get_device_info(Device(0, 0), ctypes.byref(info)))
        return info.name.decode(), info.level.decode()

    def forward(self, query, key, value, output, causal, threads, lse=None):
        """A function that runs the call: tensors are (batch, heads, seqlen, head_dim)."""
        args = ForwardArgs(struct_size=ctypes.sizeof(ForwardArgs), num_threads=threads)
        return self.cpu_call("forward", args, TENSORS[:4], (query, key, value, output), lse, causal)

    def backward(self, query, key, value, output, lse, grad_output, gradients, causal, threads):
        """As forward; `gradients` are query's, key's and value's."""
        args = BackwardArgs(struct_size=ctypes.sizeof(BackwardArgs), num_threads=threads)
        names = [name for name in GRADIENT_TENSORS[:9] if name != "lse"]
        tensors = (query, key, value, output, grad_output, *gradients)
        return self.cpu_call("backward", args, names, tensors, lse, causal)

    def cpu_call(self, phase, args, names, tensors, lse, causal):
        args.flags = CAUSAL if causal else 0
        if lse is not None:
            describe(args.lse, lse)
        for name, tensor in zip(names, tensors):
            describe(getattr(args, name), tensor.transpose(1, 2))
        size = ctypes.c_size_t()
        workspace_of = getattr(self.lib, f"fa3_{phase}_workspace")
        self.check(workspace_of(ctypes.byref(args), ctypes.byref(size)))
        workspace = ctypes.create_string_buffer(size.value)
        args.workspace, args.workspace_size = ctypes.addressof(workspace), size.value
        run = getattr(self.lib, f"fa3_{phase}")
        keep = (tensors, lse, workspace)

        def call():
            assert keep
            self.check(run(ctypes.byref(args)))

        return call

    def prepare_gpu(self):
        self.check(self.lib.fa3_prepare(Device(CUDA, torch.cuda.current_device())))

    def forward_gpu(
        self, query, key, value, output, causal=False, window=None, lengths=None, lse=None
    ):
        """A function that queues the call on the current stream: tensors are (batch, seqlen, heads,
        head_dim), or (total, heads, head_dim) with `lengths`, the cumulative ones as a tensor and
        the longest. `window` is (left, right)."""
        args = ForwardArgs(struct_size=ctypes.sizeof(ForwardArgs))
        args.flags = (CAUSAL if causal else 0) | (WINDOW if window else 0)
        if window:
            args.window_left, args.window_right = window
        tensors = dict(zip(TENSORS, (query, key, value, output, lse)))
        if lengths:
            tensors["cu_seqlens_q"] = tensors["cu_seqlens_k"] = lengths[0]
            args.max_seqlen_q = args.max_seqlen_k = lengths[1]
        return self.gpu_call("forward", args, tensors)

    def backward_gpu(
        self,
        query,
        key,
        value,
        output,
        lse,
        grad_output,
        gradients,
        causal=False,
        window=None,
        lengths=None,
        deterministic=False,
    ):
        """As forward_gpu; `gradients` are query's, key's and value's."""
        args = BackwardArgs(struct_size=ctypes.sizeof(BackwardArgs))
        args.flags = (CAUSAL if causal else 0) | (DETERMINISTIC if deterministic else 0)
        if window:
            args.flags |= WINDOW
            args.window_left, args.window_right = window
        tensors = (query, key, value, output, lse, grad_output, *gradients)
        tensors = dict(zip(GRADIENT_TENSORS, tensors))
        if lengths:
            tensors["cu_seqlens_q"] = tensors["cu_seqlens_k"] = lengths[0]
            args.max_seqlen_q = args.max_seqlen_k = lengths[1]
        return self.gpu_call("backward", args, tensors)

    def gpu_call(self, phase, args, tensors):
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        device = tensors["query"].device
        args.device_type, args.device_index = CUDA, device.index
        for name, tensor in tensors.items():
            describe(getattr(args, name), tensor)
        size = ctypes.c_size_t()
        workspace_of = getattr(self.lib, f"fa3_{phase}_workspace")
        self.check(workspace_of(ctypes.byref(args), ctypes.byref(size)))
        workspace = torch.empty(max(size.value, 1), dtype=torch.uint8, device=device)
        args.workspace, args.workspace_size = workspace.data_ptr(), size.value
        run, pointer = getattr(self.lib, f"fa3_{phase}"), ctypes.byref(args)
        keep = (tensors, args, workspace)

        def call():
            assert keep
            args.stream = torch.cuda.current_stream().cuda_stream
            self.check(run(pointer))

        return call
