"""Standard normals on the CPU: the C++ Philox kernel, `torch.randn`, and the torch reference of the same noise."""

import pytest
import torch

from tpgrpo_fast import _cpp, noise

pytestmark = pytest.mark.skipif(not _cpp.available(), reason="the C++ library is not built here")


@pytest.mark.parametrize("threads", [1, 2])
def test_normals(race, smoke, threads):
    shape = (2, 4, 8, 8) if smoke else (48, 16, 64, 64)
    row_uid = torch.arange(shape[0])
    out = torch.empty(shape)

    def reference() -> torch.Tensor:
        return noise.normal(shape, seed=1, iteration=0, row_uid=row_uid)

    def cpp() -> torch.Tensor:
        return _cpp.philox_normal(out, 1, row_uid, 0, int(noise.Stream.STEP))

    torch.testing.assert_close(cpp(), reference(), rtol=0, atol=1e-6)
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        race(
            f"normals {list(shape)}, {threads} threads",
            {"torch.randn": lambda: torch.randn(shape), "torch reference": reference, "cpp": cpp},
            elements=out.numel(),
            bytes_moved=4 * out.numel(),
        )
    finally:
        torch.set_num_threads(previous)
