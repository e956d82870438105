"""Builds the CPU kernels of csrc/ into one shared library; everything else is in pyproject.toml.

The library knows neither torch nor Python (tpgrpo_fast/_cpp.py loads it with ctypes), so the build needs a C++17
compiler only, and one wheel serves every version of both. Without a compiler the package installs all the same and
runs its torch code.
"""

import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

# Portable code only: kernels choose their instruction set at run time. Square roots become instructions without errno.
# -fopenmp-simd vectorises sums; it needs no OpenMP library.
COMPILE_ARGS = [
    "-std=c++17",
    "-O3",
    "-fvisibility=hidden",
    "-fopenmp-simd",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
]


class BuildSharedLibrary(build_ext):
    """Compiles with OpenMP where the compiler has it, without otherwise, and names the file without a Python tag."""

    def get_ext_filename(self, ext_name):
        return ext_name.replace(".", "/") + ".so"

    def build_extension(self, ext):
        try:
            self._build(ext, ["-fopenmp"])
        except (CompileError, LinkError):
            try:
                self._build(ext, [])
                print("warning: the compiler has no OpenMP; the CPU kernels will use one thread", file=sys.stderr)
            except (CompileError, LinkError):
                print(
                    "warning: no working C++17 compiler; the CPU kernels are left out and torch does their work "
                    "(install g++, then install the package again)",
                    file=sys.stderr,
                )
                raise

    def _build(self, ext, openmp):
        ext.extra_compile_args = COMPILE_ARGS + openmp
        ext.extra_link_args = openmp
        super().build_extension(ext)


class PlatformWheel(bdist_wheel):
    """Tags the wheel for this platform and any Python 3: the library has no Python interface."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            "tpgrpo_fast._tpgrpo_cpp",
            sources=["csrc/tpgrpo_cpp.cpp"],
            depends=sorted(glob("csrc/*.h") + glob("csrc/*.inc")),
            include_dirs=["csrc"],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildSharedLibrary, "bdist_wheel": PlatformWheel},
)
