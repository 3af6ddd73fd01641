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
