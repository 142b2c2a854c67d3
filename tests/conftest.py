"""What all tests share: one thread per operator, the same examples in every run, real gradients."""

import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file
from torch import Tensor

pytest.register_assert_rewrite("tests.contracts", "tests.probes")

# Ranks are threads or processes of their own; more threads would only wait for each other.
torch.set_num_threads(1)

# A shell ignores SIGINT for jobs in the background, and so would all that the tests start and stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No database: a run depends on nothing that an earlier run found. `--hypothesis-profile soak`.
settings.register_profile(
    "default", derandomize=True, deadline=None, database=None, max_examples=60
)
settings.register_profile("sanitize", settings.get_profile("default"), max_examples=20)
settings.register_profile("soak", settings.get_profile("default"), max_examples=5000)
settings.load_profile("default")

DATA = Path(__file__).parent / "data"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``gpu`` where there is none, and say so."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")


@pytest.fixture(scope="session")
def gradients() -> Tensor:
    """Gradients of a language model, float32[8 ranks, entries]."""
    (tensor,) = load_file(DATA / "smollm2_gradients.safetensors").values()
    return tensor.float()
