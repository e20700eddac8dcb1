"""The wheel: what is in it, and that it works in an empty environment, away from the checkout."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from paths import ROOT
from ttnn_moe.errors import ContractError
from ttnn_moe.sources import FOLDERS, SourceMissing, kernel_path

# each in the wheel, and where it is in the checkout
PACKAGES = {"ttnn_moe": "ttnn_moe", "ttnn_moe/models": "models", **{f"ttnn_moe/{folder}": folder for folder in FOLDERS}}
HAS_HEADERS = (Path(sysconfig.get_path("include")) / "Python.h").exists()


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed, without anything that could lead it back to the checkout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TTNN_MOE_LOG", "TTNN_MOE_BACKEND")
    env = {key: value for key, value in os.environ.items() if key not in hidden} | environment
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done


pytestmark = pytest.mark.slow

# what may lie in a tree and belongs to nobody else
SECRETS = (".env", ".npmrc", ".pypirc", "id_rsa", "key.pem", "credentials.json", "secrets.yaml", "notes.txt", "cli.py~")
MADE = (
    ".git",
    ".venv*",
    ".torch-npu",
    ".triton-ascend",
    ".ascendnpu-ir",
    ".*_cache",
    ".hypothesis",
    "__pycache__",
    "build",
    "dist",
    "*.so",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, with secrets in every folder, and folders of secrets."""
    root = tmp_path_factory.mktemp("tree") / "checkout"
    shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*MADE))
    for folder in (".ssh", "ttnn_moe/.aws", "tests/private"):
        (root / folder).mkdir()
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())]:
        for name in SECRETS:
            (folder / name).write_text("secret")
    return root


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    # Not isolated: what builds is in this environment, so nothing is fetched.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    command += ["-C", "cmake.build-type=Debug", "-C", "cmake.define.CMAKE_UNITY_BUILD=ON"]  # less than half of the time
    if not HAS_HEADERS:
        command += ["-C", "cmake.define.TTNN_MOE_PLANNER=OFF"]
    run(*command, str(tree), cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@dataclass(frozen=True)
class Environment:
    bin: Path
    site: Path
    cwd: Path

    def run(self, *command: str) -> str:
        return run(self.bin / command[0], *command[1:], cwd=self.cwd).stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel in an environment of its own, and an empty folder to run in.

    torch is too big to be installed once more, so the dependencies are lent by this environment: a .pth file names
    a folder of links to all that is in its site-packages except this project, however that is installed here.
    """
    base = tmp_path_factory.mktemp("away")
    venv.create(base / "env", with_pip=False)
    python = base / "env" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=base).stdout.strip())
    lent = base / "lent"
    lent.mkdir()
    own = _own_names()
    for key in ("purelib", "platlib"):
        for entry in Path(sysconfig.get_path(key)).iterdir():
            if entry.name not in own and not (lent / entry.name).exists():
                (lent / entry.name).symlink_to(entry)
    (site / "lent.pth").write_text(f"{lent}\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=base)
    (base / "cwd").mkdir()
    return Environment(base / "env" / "bin", site, base / "cwd")


def _own_names() -> set[str]:
    """Names in site-packages that belong to this project as it is installed here, if it is."""
    try:
        files = importlib.metadata.files("ttnn-moe") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    return {file.parts[0] for file in files} | {"ttnn_moe"}


def _checkout_files(*folders: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so")
    }


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = {name for name in names if re.match(r"ttnn_moe-[^/]+\.dist-info/", name)}
    native = {name for name in names if re.fullmatch(r"ttnn_moe/_planner\.[\w.-]+\.so", name)}
    assert len(native) == HAS_HEADERS
    assert any(name.endswith("/licenses/LICENSE") for name in info)
    emulator = {f"ttnn_moe/tenstorrent/emulator/{name}" for name in _checkout_files("cpp/emulator")}
    held = {
        name.replace(folder, package, 1) for package, folder in PACKAGES.items() for name in _checkout_files(folder)
    }
    assert names - info - native == held | emulator


@pytest.mark.parametrize(
    "name",
    [
        "ttnn_moe/py.typed",
        "ttnn_moe/_planner.pyi",
        "ttnn_moe/models/qwen3/demo.py",
        "ttnn_moe/models/qwen3/tiny/config.json",
        "ttnn_moe/models/qwen3/tiny/tokenizer.json",
        "ttnn_moe/models/qwen3/tiny/*.safetensors",
        "ttnn_moe/models/qwen3/tiny/*.jinja",
        "ttnn_moe/gpu_kernels/README.md",
        "ttnn_moe/device_kernels/README.md",
    ],
)
def test_the_wheel_holds_data_files(wheel: Path, name: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert any(Path(held).match(name) for held in archive.namelist())


def test_the_sdist_holds_what_builds_and_tests_it(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml"} <= names
    assert _checkout_files(*PACKAGES.values(), "cpp", "tests") <= names
    assert not [name for name in names if name.startswith((".venv", "build/", "dist/")) or "__pycache__" in name]
    assert not [name for name in names if Path(name).name in SECRETS]
    if (ROOT / ".git").exists():
        listed = run("git", "ls-files", "--recurse-submodules", cwd=ROOT).stdout.split("\n")
        tracked = {name for name in listed if name and (ROOT / name).exists()} - {".ci/run", ".gitignore"}
        assert tracked <= names, "a new kind of file: list it in pyproject.toml, sdist.include"


def test_a_wheel_of_a_tree_with_secrets_holds_none(tree: Path, tmp_path: Path) -> None:
    """The wheel that pip makes of a checkout, without an sdist between. What CMake compiles has a test above."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "-C", "cmake.define.TTNN_MOE_PLANNER=OFF"]
    run(*command, "--outdir", str(tmp_path), str(tree), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "ttnn_moe/models/qwen3/demo.py" in names and "ttnn_moe/gpu_kernels/README.md" in names
    assert not [name for name in names if Path(name).name in SECRETS]
    emulator = {f"ttnn_moe/tenstorrent/emulator/{name}" for name in _checkout_files("cpp/emulator")}
    assert emulator == {name for name in names if name.startswith("ttnn_moe/tenstorrent/emulator/cpp/")}


EDITABLE = Path(sysconfig.get_path("platlib")) / "_editable_skbc_ttnn_moe.pth"


@pytest.mark.skipif(not EDITABLE.exists(), reason="not installed as editable")
def test_an_editable_install_puts_the_checkout_alone_on_the_path() -> None:
    """In the folder around it, a folder named after a package would be imported as that."""
    folders = [line for line in EDITABLE.read_text().splitlines() if line and not line.startswith("import ")]
    assert folders == [str(ROOT)]


def test_the_demo_generates_text(installed: Environment) -> None:
    out = installed.run("python", "-m", "ttnn_moe.models.qwen3.demo", "--max-new-tokens", "8")
    assert re.search(r"^│ \w+", out, re.M)
    assert not list(installed.cwd.iterdir())


def test_the_command_generates_text(installed: Environment) -> None:
    out = installed.run("ttnn-moe", "generate", "--prompt", "copy: abc", "--max-new-tokens", "8")
    assert out.strip() and "new tokens" not in out


def test_doctor_runs(installed: Environment) -> None:
    found = json.loads(installed.run("ttnn-moe", "doctor", "--json"))
    assert found["backends"]["reference"]["available"]
    assert found["planner"]["built"] == HAS_HEADERS
    assert installed.run("ttnn-moe", "doctor").startswith("ttnn-moe ")


def test_everything_is_imported_from_the_wheel(installed: Environment) -> None:
    """Or the tests above would say nothing."""
    code = """
import ttnn_moe.cli, json, ttnn_moe.models.qwen3 as qwen3
from ttnn_moe.sources import FOLDERS, kernel_path
paths = [ttnn_moe.__file__, qwen3.__file__, *(str(kernel_path(folder, "README.md")) for folder in FOLDERS)]
print(json.dumps(paths))
"""
    paths = [Path(path) for path in json.loads(installed.run("python", "-c", code))]
    assert len(paths) == 2 + len(FOLDERS)
    for path in paths:
        assert path.is_file() and path.is_relative_to(installed.site.resolve())


@pytest.mark.parametrize("folder", FOLDERS)
def test_kernel_path_in_the_checkout(folder: str) -> None:
    assert kernel_path(folder, "README.md") == kernel_path(f"{folder}/README.md") == ROOT / folder / "README.md"
    assert kernel_path(folder).is_dir()


def test_a_missing_kernel_source_is_named() -> None:
    with pytest.raises(SourceMissing, match="gpu_kernels/cuda/nonesuch.cu is missing.*install"):
        kernel_path("gpu_kernels", "cuda", "nonesuch.cu")


@pytest.mark.parametrize("parts", [(), ("ttnn_moe", "cli.py"), ("gpu_kernels", "..", "LICENSE"), ("/etc/passwd",)])
def test_only_kernel_sources_are_found(parts: tuple[str, ...]) -> None:
    with pytest.raises(ContractError, match="not the path of a kernel source"):
        kernel_path(*parts)
