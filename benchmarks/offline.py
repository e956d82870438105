"""Compiles every Triton kernel for GPUs that are not here, and holds what it takes of them in a table.

    python -m benchmarks.offline            # compare with benchmarks/offline.json
    python -m benchmarks.offline --write    # after a change of a kernel or of Triton: write the table anew

The kernels are launched by their own wrappers on CPU tensors, and each launch is turned into a compilation with the
signature, the alignments and the options that a device would see. Registers, spills and shared memory come from the
machine code: `cuobjdump` reads a cubin's, AMD's assembly states its own. Bytes moved per element are counted in the
PTX, vector by vector, and held to the minimum. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tpgrpo_fast.kernels import credit, steps
from tpgrpo_fast.kernels._common import MAX_BLOCK

TABLE = Path(__file__).with_name("offline.json")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Usage = dict[str, int]

# The fewest big tensors that a pass over memory can touch, as (in the storage dtype, in float32).
MINIMUM = {
    "sde_step_fwd_kernel / guided": (4, 0),
    "sde_step_fwd_kernel / unguided": (3, 0),
    "sde_step_fwd_kernel / guided, first ODE state": (5, 0),
    "sde_step_fwd_kernel / guided, given noise, mean": (5, 1),
    "step_log_prob_fwd_kernel / guided": (4, 0),
    "step_log_prob_fwd_kernel / unguided": (3, 0),
    "step_log_prob_bwd_kernel / guided": (6, 0),
    "step_log_prob_bwd_kernel / unguided": (4, 0),
    "grpo_loss_fwd_kernel / guided, KL": (5, 0),
    "grpo_loss_fwd_kernel / unguided": (3, 0),
    "grpo_loss_bwd_kernel / guided, KL": (7, 0),
    "grpo_loss_bwd_kernel / unguided": (4, 0),
    "philox_normal_fwd_kernel": (0, 1),
}


class OfflineDriver:
    """What Triton asks of a device before it compiles."""

    def __init__(self, place: int, target: GPUTarget) -> None:
        self._place, self._target = place, target

    def get_current_device(self) -> int:
        return self._place

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def launches(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """(variant, call) of every wrapper, on tables of SD3's latents; the variant names what differs from the kernel."""
    rows, elements = 2, 16 * 32 * 32
    velocity, uncond, sample, following, reference = (torch.empty(rows, elements, dtype=dtype) for _ in range(5))
    ones, uid, vector = torch.ones(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64), torch.ones(rows)

    def step(uncond: torch.Tensor | None, noise: torch.Tensor | None, mean: bool, first: bool) -> None:
        steps.sde_step(
            velocity, uncond, 4.5, sample, ones, ones, ones, noise, 0, 0, uid, uid, dtype, False, False, mean,
            ones if first else None,
        )  # fmt: skip

    def loss(uncond: torch.Tensor | None, reference: torch.Tensor | None) -> None:
        common = (velocity, uncond, 4.5, sample, following, reference, ones, ones, ones, ones)
        steps.grpo_loss_forward(*common, vector, vector, vector, 1e-4, 5.0, False, False)
        steps.grpo_loss_backward(vector, vector, *common, False, False)

    def log_prob(uncond: torch.Tensor | None) -> None:
        common = (velocity, uncond, 4.5, sample, following, ones, ones, ones, False, False)
        steps.step_log_prob_forward(*common)
        steps.step_log_prob_backward(vector, *common)

    yield "guided", lambda: step(uncond, None, False, False)
    yield "unguided", lambda: step(None, None, False, False)
    yield "guided, first ODE state", lambda: step(uncond, None, False, True)
    yield "guided, given noise, mean", lambda: step(uncond, sample, True, False)
    yield "guided", lambda: log_prob(uncond)
    yield "unguided", lambda: log_prob(None)
    yield "guided, KL", lambda: loss(uncond, reference)
    yield "unguided", lambda: loss(None, None)
    if dtype == torch.float32:
        yield "", lambda: steps.philox_normal(torch.empty(rows, elements), 0, uid, 0, uid)
        for balance in (False, True):
            yield "balanced" if balance else "", lambda balance=balance: _credit(balance)


def _credit(balance: bool) -> None:
    rewards, bounds = torch.zeros(48, 9), torch.tensor([0, 24, 48])
    credit.assign(
        rewards, torch.arange(48), bounds, 24, trend="global", consistent=True, first_step=True, positive_only=False,
        global_bonus=False, by_global=False, add=False, balance=balance, turning=None, normalize=True, eta=1.0,
        sign_eps=0.0, std_eps=1e-4,
    )  # fmt: skip


def compile_all(targets: list[str], dtypes: list[str], variants: str = ".*") -> dict[str, Usage]:
    """Registers, spills (bytes) and shared memory (bytes) by "target / dtype / kernel / variant"."""
    found: dict[str, Usage] = {}
    compile_kernel = JITFunction.run

    for place, target in enumerate(TARGETS):
        if target not in targets:
            continue
        triton.runtime.driver.set_active(OfflineDriver(place, TARGETS[target]))
        for dtype in dtypes:
            for variant, call in launches(DTYPES[dtype]):
                if not re.fullmatch(variants, variant):
                    continue

                def run(
                    function: Any,
                    *args: Any,
                    grid: Any,
                    warmup: bool,
                    path: tuple = (target, dtype, variant),
                    **kwargs: Any,
                ) -> None:
                    compiled = compile_kernel(function, *args, grid=grid, warmup=True, **kwargs)
                    key = " / ".join((*path[:2], function.__name__, path[2])).removesuffix(" / ")
                    found[key] = usage(compiled)

                with mock.patch.object(JITFunction, "run", run):
                    call()
    return found


def usage(compiled: Any) -> Usage:
    """What one compiled kernel takes of a device."""
    if "cubin" in compiled.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
        numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
        found = {
            "registers": numbers["REG"],
            "spills": numbers["STACK"] + numbers["LOCAL"],
            "shared": compiled.metadata.shared,
        }
        # Each thread moves whole vectors of big tensors; what is loaded for a row is scalar.
        vectors = re.findall(r"(?:ld|st)\.global(?:\.[a-z_:0-9]+)*?\.v(\d)\.b(\d+)", compiled.asm["ptx"])
        moved = 32 * compiled.metadata.num_warps * sum(int(count) * int(bits) // 8 for count, bits in vectors)
        return found | ({"bytes_per_element": moved // MAX_BLOCK} if moved else {})
    fields = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)\s*$", compiled.asm["amdgcn"], re.M)}
    return {
        "registers": fields["vgpr_count"],
        # Scalar registers spill to lanes of vector registers, which costs no memory traffic.
        "spills": 4 * fields["vgpr_spill_count"] + fields["private_segment_fixed_size"],
        "shared": compiled.metadata.shared,
    }


def differences(found: dict[str, Usage], table: dict[str, Any]) -> list[str]:
    """What is wrong: spills, more traffic than needed; with the table's Triton version any number that is not there."""
    wrong = [f"{key}: spills {usage['spills']} bytes" for key, usage in found.items() if usage["spills"]]
    for key, usage in found.items():
        target, dtype, kernel = key.split(" / ", 2)
        if kernel in MINIMUM and target.startswith("sm_"):
            stored, single = MINIMUM[kernel]
            needed, moved = DTYPES[dtype].itemsize * stored + 4 * single, usage.get("bytes_per_element")
            if moved != needed:
                wrong.append(f"{key}: moves {moved} bytes an element, {needed} would do")
    if table["triton"] == triton.__version__:
        for key, usage in found.items():
            if usage != table["kernels"].get(key):
                wrong.append(f"{key}: {usage}, the table has {table['kernels'].get(key)}")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--variants", default=".*", help="regular expression of the variants to compile")
    parser.add_argument("--write", action="store_true", help="write the table")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: unset it, interpreted kernels are not compiled")
    found = compile_all(options.targets, options.dtypes, options.variants)
    if options.write:
        TABLE.write_text(json.dumps({"triton": triton.__version__, "kernels": found}, indent=1) + "\n")
    wrong = differences(found, json.loads(TABLE.read_text()))
    width = max(map(len, found))
    for key, usage in found.items():
        print(f"{key:{width}}  " + "  ".join(f"{name} {number:4d}" for name, number in usage.items()))
    print(*wrong, f"{len(found)} kernels, {len(wrong)} differences", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
