"""A kernel of the tests' own, small enough to know its every instruction."""

from pathlib import Path

from dynamiq.kernels.architecture import Architecture, Target
from dynamiq.kernels.registry import KernelSpec

HOPPER = Target(Architecture(9, 0, "a"))

HEADER = """
struct Arguments { const float4* x; float* y; int width; };
__device__ float combine(float4 v, float w) { return v.x * w + v.y; }
"""
SOURCE = """
#include "combine.cuh"
extern "C" __global__ void sample(Arguments a, long long first, long long last) {
    long long i = first + threadIdx.x;
    if (i < last) a.y[i] = combine(a.x[i], a.y[i]);
}
"""


def write_kernel(folder: Path, source: str = SOURCE, header: str = HEADER) -> KernelSpec:
    """Return the row of a kernel ``sample`` that is written into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sample.cu").write_text(source, "utf-8")
    (folder / "combine.cuh").write_text(header, "utf-8")
    return KernelSpec("sample", folder.name, has_widths=True, root=folder.parent)
