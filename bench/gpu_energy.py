"""What a call takes of a GPU's energy, by the counter of NVIDIA's management library (NVML): all that
the card draws, memory included, in thousandths of a joule. A part of bench/gpu.py."""

import ctypes
import time

import torch

WARM_UP = 0.15  # seconds until power and clock have settled, and the counter has come after
SECONDS = 0.4  # of replays after that: the counter is brought up to date about ten times a second
MOST_SECONDS = 1.5


class Unread(Exception):
    """The counter cannot be read; says why."""


class Meter:
    """The counter of the current device."""

    def __init__(self):
        try:
            self.library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise Unread(str(error)) from None
        self.library.nvmlErrorString.restype = ctypes.c_char_p
        self.device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
        self.check(self.library.nvmlInit_v2())
        self.check(self.library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self.device)))
        self.read()

    def check(self, status):
        if status:
            raise Unread(f"NVML: {self.library.nvmlErrorString(status).decode()}")

    def read(self):
        """Joules since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        count = self.library.nvmlDeviceGetTotalEnergyConsumption
        self.check(count(self.device, ctypes.byref(millijoules)))
        return millijoules.value * 1e-3

    def measure(self, replay):
        """Watts, and milliseconds of a replay, while replays follow each other. The watts are those
        between the first and the last change of the counter, which may lag behind."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin, last, count = time.perf_counter(), self.read(), 0
        changes = []  # (when, joules)
        start.record()
        replay()
        while len(changes) < 3 or time.perf_counter() < begin + WARM_UP + SECONDS:
            queued = torch.cuda.Event()
            queued.record()
            replay()  # the next, so that the GPU always has one
            count += 1
            while not queued.query():
                now, joules = time.perf_counter(), self.read()
                if joules != last and now > begin + WARM_UP:
                    changes.append((now, joules))
                last = joules
            if time.perf_counter() > begin + MOST_SECONDS:
                break
        end.record()
        end.synchronize()
        if len(changes) < 2:
            raise Unread(f"the counter did not change twice in {MOST_SECONDS} s")
        (first, before), (then, after) = changes[0], changes[-1]
        return (after - before) / (then - first), start.elapsed_time(end) / (count + 1)
