"""Output files: whole or not there, whatever happens."""
import os
import resource
import signal
import subprocess
import time

import numpy as np

import program
from program import INPUT, OUTPUT, USAGE, assert_close, batched, random_qkv

INPUTS = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy")


class Output(program.ProgramTest):
    def setUp(self):
        super().setUp()
        self.qkv = random_qkv()
        self.expected = batched(*self.qkv)
        self.save(q=self.qkv[0], k=self.qkv[1], v=self.qkv[2])

    def test_onto_an_input(self):
        """The output may replace what it was made of, and the lse another input."""
        self.save(v=self.qkv[2][..., :16])
        output, lse = batched(self.qkv[0], self.qkv[1], self.qkv[2][..., :16])
        self.succeed("run", *INPUTS, "--out", "q.npy", "--lse", "k.npy")
        assert_close(self, self.load("q.npy"), output, np.float32, 8)
        assert_close(self, self.load("k.npy"), lse, np.float32, 8)

    def test_nowhere_to_write(self):
        (self.folder / "folder.npy").mkdir()
        os.symlink("nothing", self.path("dangling.npy"))
        os.mkfifo(self.path("pipe.npy"))
        proc = [("/proc/o.npy", "/proc/o.npy: ")] if os.path.ismount("/proc") else []
        for name, text in (*proc, ("none/o.npy", "this output's folder: No such file"), ("folder.npy", "not a regular file"),
                           ("dangling.npy", "a symbolic link to nothing"),
                           ("pipe.npy", "not a regular file"), ("q.npy/o.npy", "Not a directory"),
                           ("x" * 300 + ".npy", "too long")):
            done = self.refuse(OUTPUT, [name, text], "run", *INPUTS, "--out", name)
            self.assertNotIn("using", done.stderr)  # nothing was computed for nothing
            # What was begun for the output is gone too.
            self.refuse(OUTPUT, [name, text], "run", *INPUTS, "--out", "o.npy", "--lse", name)
        for name in ("/dev/null", "o", "o.txt", "o.npz", ".npy", ""):
            self.refuse(USAGE, ["expected a name that ends in"], "run", *INPUTS, "--out", name)

    def test_same_file_for_both(self):
        for lse in ("o.npy", "./o.npy", self.path("o.npy")):
            self.refuse(USAGE, ["o.npy: --out and --lse are the same file"], "run", *INPUTS,
                        "--out", "o.npy", "--lse", lse)

    def test_a_link_stays_a_link(self):
        (self.folder / "there").mkdir()
        (self.folder / "there" / "o.npy").write_bytes(b"old")
        os.symlink("there/o.npy", self.path("link.npy"))
        self.succeed("run", *INPUTS, "--out", "link.npy")
        self.assertTrue((self.folder / "link.npy").is_symlink())
        assert_close(self, self.load("there/o.npy"), self.expected[0], np.float32, 8)

    def test_permissions(self):
        self.succeed("run", *INPUTS, "--out", "o.npy", umask=0o027)
        self.assertEqual(os.stat(self.path("o.npy")).st_mode & 0o777, 0o640)
        os.chmod(self.path("o.npy"), 0o604)
        self.succeed("run", *INPUTS, "--out", "o.npy", umask=0o077)
        self.assertEqual(os.stat(self.path("o.npy")).st_mode & 0o777, 0o604)

    def test_disk_full(self):
        """Past the limit write fails as on a full disk; what was there before stays. The limit
        leaves room for files that sanitizers make for themselves."""
        limit = 1 << 20
        query, key, value = random_qkv(seqlen_q=2000)
        self.save(q=query, k=key, v=value)
        (self.folder / "o.npy").write_bytes(b"old")
        for name in ("o.npy", "new.npy", "new.safetensors"):
            self.refuse(OUTPUT, [name + ": File too large"], "run", *INPUTS, "--out", name,
                        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        self.assertEqual((self.folder / "o.npy").read_bytes(), b"old")

    def test_failure_leaves_the_old_output(self):
        (self.folder / "o.npy").write_bytes(b"old")
        (self.folder / "k.npy").write_bytes(b"bad")
        self.refuse(INPUT, ["k.npy"], "run", *INPUTS, "--out", "o.npy")
        self.assertEqual((self.folder / "o.npy").read_bytes(), b"old")

    def test_closed_streams(self):
        """A file that gets the number of a closed stream is not written to as that stream."""
        for closed in ((0,), (1,), (2,), (0, 1, 2)):
            def close(closed=closed):
                for descriptor in closed:
                    os.close(descriptor)
            process = subprocess.Popen([program.PROGRAM, "run", *INPUTS, "--out", "o.npy", "--lse",
                                        "lse.npy", "--quiet"], cwd=self.folder,
                                       preexec_fn=close)
            self.assertEqual(process.wait(60), 0, closed)
            assert_close(self, self.load("o.npy"), self.expected[0], np.float32, 8)
            assert_close(self, self.load("lse.npy"), self.expected[1], np.float32, 8)

    def test_space_is_taken_first(self):
        """What has no room is refused before the work, which would take minutes here."""
        large = np.zeros((1, 65536, 4, 64), np.float32)
        self.save(q=large, k=large, v=large)
        limit = large.nbytes - 1
        start = time.monotonic()
        self.refuse(OUTPUT, ["o.npy: File too large", f"{large.nbytes} bytes"], "run", *INPUTS,
                    "--out", "o.npy", env={**os.environ, "FA3_CPU_LEVEL": "plain"},
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        self.assertLess(time.monotonic() - start, 30)

    def test_file_ends_where_it_is_written(self):
        """What was reserved beyond is given back."""
        for name in ("o.npy", "o.safetensors"):
            self.succeed("run", *INPUTS, "--out", name)
            status = os.stat(self.path(name))
            self.assertLess(status.st_size, self.expected[0].size * 4 + 512)

    def test_signals(self):
        """Ended while it works, by any signal that can be caught: nothing is left of the output."""
        large = np.zeros((1, 16384, 4, 64), np.float32)
        self.save(q=large, k=large, v=large)
        environment = {**os.environ, "FA3_CPU_LEVEL": "plain"}
        before = sorted(os.listdir(self.folder))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGALRM,
                       signal.SIGUSR1, signal.SIGXCPU, signal.SIGRTMIN + 3):
            process = subprocess.Popen([program.PROGRAM, "run", *INPUTS, "--out", "o.safetensors",
                                        "--lse", "lse.npy"], cwd=self.folder, env=environment,
                                       stderr=subprocess.DEVNULL)
            deadline = time.monotonic() + 60
            while len(os.listdir(self.folder)) < len(before) + 2 and time.monotonic() < deadline:
                self.assertIsNone(process.poll())
                time.sleep(0.01)
            process.send_signal(number)
            self.assertEqual(process.wait(60), -number)
            self.assertEqual(sorted(os.listdir(self.folder)), before)

    def test_safetensors_is_aligned(self):
        self.succeed("run", *INPUTS, "--out", "o.safetensors")
        content = (self.folder / "o.safetensors").read_bytes()
        self.assertEqual(int.from_bytes(content[:8], "little") % 8, 0)


program.main()
