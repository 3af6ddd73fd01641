"""The progress bar: on a terminal only, and the work is the same."""
import os
import pty
import re
import subprocess
import threading
import time

import numpy as np

import program

# Slow enough to be seen, on any machine.
SLOW = {**os.environ, "FA3_CPU_LEVEL": "plain"}
INPUTS = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--threads", "1")


class Terminal(program.ProgramTest):
    def on_terminal(self, *arguments):
        """Runs with stderr on a terminal; returns what it printed there."""
        master, slave = pty.openpty()
        printed = []

        def read():
            try:
                while chunk := os.read(master, 4096):
                    printed.append(chunk)
            except OSError:  # the other side is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        done = subprocess.run([program.PROGRAM, *arguments], cwd=self.folder, env=SLOW, stderr=slave,
                              stdout=subprocess.PIPE, text=True, timeout=240)
        os.close(slave)
        reader.join()
        os.close(master)
        text = b"".join(printed).decode()
        self.assertEqual(done.returncode, 0, text)
        self.stdout = done.stdout
        return text

    def check_bar(self, text, label):
        shown = [int(percent) for percent in re.findall(label + r" \[[#.]{30}\] +(\d+)%, \d+:\d\d left",
                                                        text)]
        self.assertGreater(len(shown), 1, text)
        self.assertEqual(shown, sorted(shown))
        self.assertLessEqual(shown[-1], 100)
        self.assertTrue(text.endswith(" \r"), "the bar is wiped")

    def make_inputs(self, batch, seqlen, heads, heads_k):
        generator = np.random.default_rng(0)
        for name, count in (("q", heads), ("k", heads_k), ("v", heads_k)):
            self.save(**{name: generator.standard_normal((batch, seqlen, count, 64),
                                                         dtype=np.float32)})

    def check_run(self, *shapes):
        """In parts, which are rows, heads or sequences, it gives what it gives in one. Takes the
        first shape that is work enough for this machine."""
        for shape in shapes:
            self.make_inputs(*shape)
            start = time.monotonic()
            done = self.succeed("run", *INPUTS, "--causal", "--out", "whole.npy", "--lse",
                                "whole_lse.npy", env=SLOW)
            self.assertNotIn("%", done.stderr)
            if time.monotonic() - start > 1:
                break
        text = self.on_terminal("run", *INPUTS, "--causal", "--out", "parts.npy", "--lse",
                                "parts_lse.npy", "--device", "cpu")
        self.check_bar(text, "attention")
        for name in ("{}.npy", "{}_lse.npy"):
            parts, whole = self.load(name.format("parts")), self.load(name.format("whole"))
            self.assertFalse(np.isnan(parts).any())
            np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-5)

    def test_run_in_rows(self):
        self.check_run(*((1, 4096 * 2**i, 1, 1) for i in range(5)))

    def test_run_in_heads(self):
        self.check_run(*((1, 4096, 8 * 2**i, 4 * 2**i) for i in range(5)))

    def test_run_in_sequences(self):
        self.check_run(*((16 * 2**i, 1024, 4, 4) for i in range(6)))

    def test_verify(self):
        self.make_inputs(1, 4096, 1, 1)
        self.succeed("run", *INPUTS, "--out", "o.npy")
        arguments = ("verify", *INPUTS[:-2], "--out", "o.npy", "--rows")
        self.check_bar(self.on_terminal(*arguments, "300"), "verify")
        self.assertNotIn("%", self.succeed(*arguments, "100").stderr)

    def test_bench(self):
        text = self.on_terminal("bench", "--seqlen", "512,1024", "--head-dim", "64", "--dtype",
                                "fp32", "--repeat", "10", "--threads", "1", "--device", "cpu")
        self.check_bar(text, "bench")
        self.assertNotIn("%,", self.stdout)
        self.assertEqual(len(self.stdout.splitlines()), 5)

    def test_short_work_has_no_bar(self):
        self.make_inputs(1, 8, 1, 1)
        self.assertEqual(self.on_terminal("run", *INPUTS, "--out", "o.npy", "--device", "cpu"), "")


program.main()
