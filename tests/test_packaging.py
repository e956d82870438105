"""What the wheel, the sdist and the checkout hold, and that the checkout shadows nobody's package."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

NOT_SHIPPED = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "*.so", "build", "dist", "runs", "tests", "benchmarks"
)
HAS_COMPILER = shutil.which("c++") is not None or shutil.which("g++") is not None


def build(hook: str, source: Path, out: Path) -> Path:
    """Runs a hook of the build backend in `source` without network; returns the built file."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"
    result = subprocess.run([sys.executable, "-c", code, out], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return out / result.stdout.split()[-1]


def package_files(root: Path) -> set[str]:
    """The files that the package in a checkout consists of, the kernels behind the symlink included."""
    found = set()
    for folder, _, names in os.walk(root / "tpgrpo_fast", followlinks=True):
        found |= {str((Path(folder) / name).relative_to(root)) for name in names if "__pycache__" not in folder}
    return {name for name in found if not name.endswith((".so", ".pyc"))}


@pytest.fixture(scope="module")
def source(repository_root, tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(repository_root, copy, symlinks=True, ignore=NOT_SHIPPED)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return build("build_wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory) -> Path:
    return build("build_sdist", source, tmp_path_factory.mktemp("sdist"))


def wheel_files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_wheel_has_one_top_level_name(wheel):
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"tpgrpo_fast"}
    assert len(names) == 2


def test_wheel_holds_every_file_of_the_package(wheel, source):
    expected = package_files(source)
    assert {
        "tpgrpo_fast/py.typed",
        "tpgrpo_fast/kernels/README.md",
        "tpgrpo_fast/recipes/deepspeed/zero2.json",
    } <= expected
    library = {"tpgrpo_fast/_tpgrpo_cpp.so"} if HAS_COMPILER else set()
    assert wheel_files(wheel) == expected | library


def test_wheel_needs_no_particular_python(wheel):
    assert "-py3-none-" in wheel.name


def test_sdist_holds_what_a_build_needs(sdist, source):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    csrc = {f"csrc/{path.name}" for path in (source / "csrc").iterdir()}
    assert "csrc/tpgrpo_cpp.cpp" in csrc
    assert csrc | {"setup.py", "pyproject.toml", "LICENSE", "ds_config.json", "tpgrpo_fast/kernels/README.md"} <= names
    assert not any(name.endswith((".so", ".pyc")) for name in names)


def test_wheel_from_sdist_is_the_same(wheel, sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert wheel_files(build("build_wheel", unpacked, tmp_path)) == wheel_files(wheel)


def test_unpacked_wheel_imports_with_its_library_and_data(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """
import json, pathlib, tpgrpo_fast, tpgrpo_fast.kernels
from importlib import resources
from tpgrpo_fast import _cpp
root = resources.files("tpgrpo_fast")
print(pathlib.Path(tpgrpo_fast.__file__).parent.parent)
print(_cpp.available())
print(json.loads((root / "recipes/deepspeed/zero2.json").read_text())["zero_optimization"]["stage"])
print((root / "kernels/README.md").is_file())
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd="/", env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [str(tmp_path), str(HAS_COMPILER), "2", "True"]


def test_deepspeed_default_is_the_packaged_one(repository_root):
    in_root = json.loads((repository_root / "ds_config.json").read_text())
    packaged = json.loads((repository_root / "tpgrpo_fast/recipes/deepspeed/zero2.json").read_text())
    assert in_root == packaged
    assert in_root["zero_optimization"]["stage"] == 2


def test_kernels_is_a_symlink_without_init(repository_root):
    link = repository_root / "tpgrpo_fast" / "kernels"
    assert os.readlink(link) == os.path.join("..", "kernels")
    assert not (repository_root / "kernels" / "__init__.py").exists()


def test_transformers_diffusers_and_the_project_import_together(repository_root):
    code = """
import transformers, diffusers, tpgrpo_fast, tpgrpo_fast.kernels
from diffusers import StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection
print("together")
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=repository_root, capture_output=True, text=True)
    assert result.stdout.strip() == "together", result.stderr


def test_checkout_does_not_shadow_the_kernels_package(repository_root, tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    # With -c the working directory comes first on the path, before PYTHONPATH.
    result = subprocess.run(
        [sys.executable, "-c", "import kernels; print(kernels.__file__)"],
        cwd=repository_root, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout.strip() == str(package / "__init__.py")
