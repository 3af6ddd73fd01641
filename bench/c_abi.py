"""fa3_forward and fa3_backward on torch tensors, through the C ABI: enough for the benchmarks."""

import ctypes

import torch

from header import read_header

TYPES, CONSTANTS = read_header()
Device, DeviceInfo = TYPES["fa3_device"], TYPES["fa3_device_info"]
ForwardArgs, BackwardArgs = TYPES["fa3_forward_args"], TYPES["fa3_backward_args"]
AppendArgs, QuantizeArgs = TYPES["fa3_append_args"], TYPES["fa3_quantize_args"]
CPU, CUDA = CONSTANTS["FA3_CPU"], CONSTANTS["FA3_CUDA"]
CAUSAL, WINDOW = CONSTANTS["FA3_CAUSAL"], CONSTANTS["FA3_WINDOW"]
DETERMINISTIC = CONSTANTS["FA3_DETERMINISTIC"]
ROTATE, SUBTRACT_MEAN = CONSTANTS["FA3_ROTATE"], CONSTANTS["FA3_SUBTRACT_MEAN"]
SEPARATE_SEQUENCES = CONSTANTS["FA3_SEPARATE_SEQUENCES"]
DTYPES = {
    torch.float32: CONSTANTS["FA3_FLOAT32"],
    torch.float16: CONSTANTS["FA3_FLOAT16"],
    torch.bfloat16: CONSTANTS["FA3_BFLOAT16"],
    torch.float8_e4m3fn: CONSTANTS["FA3_FLOAT8_E4M3"],
    torch.int32: CONSTANTS["FA3_INT32"],
}


def describe(field, tensor):
    field.data, field.dtype, field.rank = tensor.data_ptr(), DTYPES[tensor.dtype], tensor.dim()
    field.shape[: tensor.dim()] = tensor.shape
    field.strides[: tensor.dim()] = tensor.stride()


def by_name(gradients):
    return dict(zip(("grad_query", "grad_key", "grad_value"), gradients))


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
        self.check(self.lib.fa3_get_device_info(Device(CPU, 0), ctypes.byref(info)))
        return info.name.decode(), info.level.decode()

    def forward(self, query, key, value, output, causal, threads, lse=None):
        """A function that runs the call: tensors are (batch, heads, seqlen, head_dim)."""
        args = ForwardArgs(struct_size=ctypes.sizeof(ForwardArgs), num_threads=threads)
        tensors = {"query": query, "key": key, "value": value, "output": output}
        return self.cpu_call("forward", args, tensors, lse, causal)

    def backward(self, query, key, value, output, lse, grad_output, gradients, causal, threads):
        """As forward; `gradients` are query's, key's and value's."""
        args = BackwardArgs(struct_size=ctypes.sizeof(BackwardArgs), num_threads=threads)
        tensors = {"query": query, "key": key, "value": value, "output": output}
        tensors |= {"grad_output": grad_output, **by_name(gradients)}
        return self.cpu_call("backward", args, tensors, lse, causal)

    def cpu_call(self, phase, args, tensors, lse, causal):
        args.flags = CAUSAL if causal else 0
        if lse is not None:
            describe(args.lse, lse)
        for name, tensor in tensors.items():
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
        self,
        query,
        key,
        value,
        output,
        causal=False,
        window=None,
        lengths=None,
        query_lengths=None,
        scales=None,
        scale_rows=0,
        **others,
    ):
        """A function that queues the call on the current stream: tensors are (batch, seqlen, heads,
        head_dim), or (total, heads, head_dim) with `lengths`, the cumulative ones as a tensor and
        the longest; with `query_lengths`, likewise, only query and output are packed. `window` is
        (left, right). `scales` are those of query (None where it has none), key and value, each of
        so many rows. `others` are more tensors, or None, by their names in the header."""
        args = ForwardArgs(struct_size=ctypes.sizeof(ForwardArgs))
        args.flags = (CAUSAL if causal else 0) | (WINDOW if window else 0)
        if window:
            args.window_left, args.window_right = window
        tensors = {"query": query, "key": key, "value": value, "output": output, **others}
        if scales is not None:
            for name, scale in zip(("query_scale", "key_scale", "value_scale"), scales):
                tensors[name] = scale
                setattr(args, f"{name}_rows", scale_rows if scale is not None else 0)
        if lengths:
            tensors["cu_seqlens_q"] = tensors["cu_seqlens_k"] = lengths[0]
            args.max_seqlen_q = args.max_seqlen_k = lengths[1]
        if query_lengths:
            tensors["cu_seqlens_q"], args.max_seqlen_q = query_lengths
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
        tensors = {"query": query, "key": key, "value": value, "output": output, "lse": lse}
        tensors |= {"grad_output": grad_output, **by_name(gradients)}
        if lengths:
            tensors["cu_seqlens_q"] = tensors["cu_seqlens_k"] = lengths[0]
            args.max_seqlen_q = args.max_seqlen_k = lengths[1]
        return self.gpu_call("backward", args, tensors)

    def quantize_gpu(
        self, tensor, codes, scale, rows, rotate=False, subtract_mean=False, tables=(None, None)
    ):
        """A function that queues the call on the current stream; `tables` are those of rotary
        embedding."""
        args = QuantizeArgs(struct_size=ctypes.sizeof(QuantizeArgs), codes_scale_rows=rows)
        args.flags = (ROTATE if rotate else 0) | (SUBTRACT_MEAN if subtract_mean else 0)
        tensors = {"input": tensor, "codes": codes, "codes_scale": scale}
        tensors |= {"rotary_cos": tables[0], "rotary_sin": tables[1]}
        return self.gpu_call("quantize", args, tensors)

    def append_gpu(self, **tensors):
        """A function that queues the call on the current stream: tensors, or None, by their names in
        the header."""
        args = AppendArgs(struct_size=ctypes.sizeof(AppendArgs), flags=SEPARATE_SEQUENCES)
        return self.gpu_call("append", args, tensors)

    def append_forward(self, append, forward):
        """The calls that append_gpu and forward_gpu gave, as one."""
        pointers = [ctypes.byref(call.args) for call in (append, forward)]

        def call():
            stream = torch.cuda.current_stream().cuda_stream
            append.args.stream = forward.args.stream = stream
            self.check(self.lib.fa3_append_forward(*pointers))

        return call

    def gpu_call(self, phase, args, tensors):
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        device = next(iter(tensors.values())).device
        args.device = Device(CUDA, device.index)
        for name, tensor in tensors.items():
            describe(getattr(args, name), tensor)
        needs_none = phase in ("append", "quantize")
        workspace = None if needs_none else self.workspace_of(phase, args, device)
        run, pointer = getattr(self.lib, f"fa3_{phase}"), ctypes.byref(args)
        keep = (tensors, args, workspace)

        def call():
            assert keep
            args.stream = torch.cuda.current_stream().cuda_stream
            self.check(run(pointer))

        call.args = args
        return call

    def workspace_of(self, phase, args, device):
        size = ctypes.c_size_t()
        find = getattr(self.lib, f"fa3_{phase}_workspace")
        self.check(find(ctypes.byref(args), ctypes.byref(size)))
        workspace = torch.empty(max(size.value, 1), dtype=torch.uint8, device=device)
        args.workspace, args.workspace_size = workspace.data_ptr(), size.value
        return workspace
