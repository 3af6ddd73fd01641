"""fa3 bench: the cells asked for, with figures that agree with each other."""
import json
from xml.etree import ElementTree

import program
from program import UNSUPPORTED, USAGE

SMALL = ("bench", "--seqlen", "40,64", "--head-dim", "16,32", "--heads", "4", "--batch", "2",
         "--repeat", "3")


class Bench(program.ProgramTest):
    def test_json(self):
        for extra, factor in ((), 1), (("--causal",), 0.5):
            report = json.loads(self.succeed(*SMALL, "--heads-k", "2", "--dtype", "fp32,fp16,bf16",
                                             "--json", *extra).stdout)
            self.assertEqual((report["device"], report["repeat"]), ("cpu", 3))
            cells = [(cell["dtype"], cell["head_dim"], cell["seqlen"])
                     for cell in report["results"]]
            self.assertEqual(cells, [(dtype, head_dim, seqlen) for dtype in ("fp32", "fp16", "bf16")
                                     for head_dim in (16, 32) for seqlen in (40, 64)])
            for cell in report["results"]:
                flops = 4 * 2 * 4 * cell["seqlen"] ** 2 * cell["head_dim"] * factor
                self.assertEqual((cell["flops"], cell["heads_k"]), (flops, 2))
                self.assertAlmostEqual(cell["tflops"] * cell["seconds_median"], flops / 1e12)
                times = [cell["seconds_" + name] for name in (
                    "min", "lower_quartile", "median", "upper_quartile", "max")]
                self.assertEqual(times, sorted(times))
                self.assertGreater(times[0], 0)

    def test_plot(self):
        """A bar for each cell, the longest for the fastest."""
        report = json.loads(self.succeed(*SMALL, "--dtype", "fp32,bf16", "--causal", "--json",
                                         "--plot", "p.svg").stdout)
        root = ElementTree.parse(self.path("p.svg")).getroot()
        bars = root.findall("{http://www.w3.org/2000/svg}rect")[1:]
        speeds = [cell["tflops"] for cell in report["results"]]
        self.assertEqual(len(bars), len(speeds))
        longest = max(range(len(bars)), key=lambda bar: float(bars[bar].get("width")))
        self.assertAlmostEqual(speeds[longest], max(speeds), delta=0.01 * max(speeds))
        text = (self.folder / "p.svg").read_text()
        self.assertIn("bf16, head dim 32, seqlen 64, causal", text)
        self.refuse(USAGE, ["--plot p.png: expected a .svg file"], *SMALL, "--plot", "p.png")
        self.refuse(USAGE, ["--heads-k 3: expected a divisor of --heads 4"], *SMALL, "--heads-k", "3")

    def test_table(self):
        lines = self.succeed(*SMALL, "--dtype", "fp32", "--threads", "1").stdout.splitlines()
        self.assertIn("1 threads; median of 3 runs", lines[0])
        self.assertEqual(lines[2].split()[:3], ["dtype", "batch", "seqlen"])
        self.assertEqual(lines[-2], "")
        self.assertIn("checked against float64", lines[-1])
        self.assertEqual([line.split()[:7] for line in lines[3:-2]],
                         [["fp32", "2", str(seqlen), "4", "4", str(head_dim), "no"]
                          for head_dim in (16, 32) for seqlen in (40, 64)])

    def test_decode(self):
        decode = ("bench", "--decode", "--batch", "2", "--heads", "4", "--heads-k", "2", "--head-dim",
                  "32", "--repeat", "3")
        for extra, page_size in ((), 0), (("--page-size", "16"), 16):
            report = json.loads(self.succeed(*decode, "--seqlen", "40,200", "--dtype",
                                             "e4m3,bf16,fp16,fp32", "--json", *extra).stdout)
            self.assertEqual(report["phase"], "decode")
            self.assertEqual([(cell["cache_dtype"], cell["keys"]) for cell in report["results"]],
                             [(dtype, keys) for dtype in ("e4m3", "bf16", "fp16", "fp32")
                              for keys in (40, 200)])
            for cell in report["results"]:
                size = {"e4m3": 1, "bf16": 2, "fp16": 2, "fp32": 4}[cell["cache_dtype"]]
                self.assertEqual(cell["bytes"], 2 * 2 * cell["keys"] * 2 * 32 * size)
                self.assertEqual((cell["seqlen"], cell["page_size"]), (1, page_size))
                self.assertAlmostEqual(cell["gigabytes_per_second"] * cell["seconds_median"],
                                       cell["bytes"] * 1e-9)
                self.assertAlmostEqual(cell["read_gigabytes_per_second"]
                                       * cell["read_seconds_median"], cell["bytes"] * 1e-9)
                self.assertGreater(cell["ratio_to_read"], 0)
        lines = self.succeed(*decode, "--seqlen", "64", "--dtype", "bf16").stdout.splitlines()
        self.assertEqual(lines[2].split()[:7],
                         ["cache", "batch", "keys", "heads", "heads_k", "head_dim", "page"])
        self.assertEqual(lines[3].split()[:7], ["bf16", "2", "64", "4", "2", "32", "-"])
        for wrong, text in ((("--backward",), "--backward is not for --decode"),
                            (("--causal",), "--causal is not for --decode"),
                            (("--plot", "p.svg"), "--plot is not for --decode"),
                            (("--page-size", "0"), "--page-size 0: expected a number of 1")):
            self.refuse(USAGE, [text], *decode, *wrong)
        self.refuse(USAGE, ["--page-size is for --decode"], *SMALL, "--page-size", "16")
        self.refuse(USAGE, ["--dtype e4m3 is for --decode"], *SMALL, "--dtype", "e4m3")

    def test_backward(self):
        report = json.loads(self.succeed(*SMALL, "--heads-k", "2", "--dtype", "fp16,fp32", "--causal",
                                         "--backward", "--deterministic", "--json").stdout)
        self.assertEqual((report["phase"], report["deterministic_asked"]), ("backward", True))
        for cell in report["results"]:
            self.assertEqual(cell["flops"], 10 * 2 * 4 * cell["seqlen"] ** 2 * cell["head_dim"] / 2)
        self.assertIn("backward pass, median", self.succeed(*SMALL, "--backward").stdout)
        self.refuse_quietly(USAGE, ["--deterministic is for --backward"], "--deterministic")

    def test_bad_options(self):
        for options in (("--seqlen", "0"), ("--seqlen", "8,"), ("--seqlen", "x"),
                        ("--head-dim", "257"), ("--dtype", "fp8"), ("--dtype", "fp32,"),
                        ("--dtype", ""), ("--repeat", "0"), ("--batch", "-1"), ("--heads", "1.5"),
                        ("--threads", "0")):
            self.refuse_quietly(USAGE, [options[0]], *options)
        self.refuse_quietly(USAGE, ["heads"], "--heads-k", "3")
        for head_dims in "16,12", "7", "512":
            self.refuse_quietly(USAGE, [f"--head-dim {head_dims}: ", "multiples of 8 up to 256"],
                                "--head-dim", head_dims)
        self.refuse_quietly(UNSUPPORTED, ["head_dim is 24"], "--decode", "--dtype", "e4m3",
                            "--head-dim", "24")
        self.refuse_quietly(USAGE, ["too large"], "--seqlen", "2147483647", "--batch", "2147483647",
                            "--heads", "2147483647")

    def refuse_quietly(self, code, texts, *options):
        """Nothing is printed that looks like a start."""
        self.assertEqual(self.refuse(code, texts, *SMALL, *options).stdout, "")


program.main()
