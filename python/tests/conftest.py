import os

# torch.compile keeps code under a key that has an operator's name, not its arguments: what another
# version of the package left there would run.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import pytest
import torch


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", "cuda"])


@pytest.fixture(autouse=True)
def seeded_and_present(request):
    torch.manual_seed(20260)
    params = getattr(request.node, "callspec", None)
    if params and params.params.get("device") == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
