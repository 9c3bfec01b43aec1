"""The packages as things that are installed and started: what they import, what shadows them, what the wheel holds."""

import email
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("ep_runtime", "kernels", "launch", "model", "protocol")


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


def test_transformers_imports_beside_our_packages(tmp_path):
    code = "import kernels, model, protocol, launch; from transformers import MixtralForCausalLM; print(kernels.__file__)"
    result = python("-P", "-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == ROOT / "kernels" / "__init__.py"


def test_the_version_is_no_version_of_the_hub_package_named_kernels():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert int(version.split(".")[0]) >= 2026


@pytest.mark.parametrize("module", ["serve", "worker", "supervise.run", "supervise.child", "frontend.main", "demo.run"])
def test_what_supervises_and_fronts_imports_no_torch(module, tmp_path):
    code = f"import sys, ep_runtime.{module}; print(sorted({{'torch', 'triton', 'transformers'}} & set(sys.modules)))"
    result = python("-P", "-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["serve", "worker"])
@pytest.mark.parametrize("shadow", ["model/__init__.py", "protocol/__init__.py", "kernels.py", "launch.py"])
def test_a_package_in_the_working_directory_is_refused_by_its_file(module, shadow, tmp_path):
    path = tmp_path / shadow
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise SystemExit('the wrong package was imported')\n")
    result = python("-m", f"ep_runtime.{module}", *(["--head", "127.0.0.1:1"] if module == "worker" else []), cwd=tmp_path)
    assert result.returncode == 2
    resolved = path.parent if path.name == "__init__.py" else path
    assert f"resolves to {resolved}" in result.stderr


def test_contradictory_flags_end_with_one_line_and_status_2(tmp_path):
    result = python("-P", "-m", "ep_runtime.serve", "--protocol", "1", "--max-num-seqs", "2", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "ep-runtime: protocol 1 runs one sequence at a time, but max_num_seqs is 2\n"


def test_importing_kernels_imports_nothing(tmp_path):
    code = "import sys; before = set(sys.modules); import kernels; print(sorted(set(sys.modules) - before))"
    assert python("-P", "-c", code, cwd=tmp_path).stdout.strip() == "['kernels']"


def test_the_wheel_holds_our_packages_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    result = python(*command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        headers = email.message_from_bytes(archive.read(metadata))
    tops = {name.split("/")[0] for name in names}
    assert tops == {*PACKAGES, metadata.split("/")[0]}
    assert not headers["Version"].startswith("0.")
    assert headers["License-Expression"] == "Apache-2.0"
    shipped = {name for name in names if not name.startswith(metadata.split("/")[0])}
    expected = {str(path.relative_to(source)) for name in PACKAGES for path in (source / name).rglob("*.py")}
    data = (ROOT / "kernels" / "tuned", ROOT / "ep_runtime" / "bench" / "machines")
    assert all(any(folder.iterdir()) for folder in data)
    tables = {str(path.relative_to(ROOT)) for folder in data for path in folder.iterdir()}
    assert shipped == expected | tables | {f"{name}/py.typed" for name in PACKAGES}


def test_no_file_holds_more_than_500_lines():
    files = [path for name in (*PACKAGES, "tests") for path in sorted((ROOT / name).rglob("*.py"))]
    assert len(files) > 50
    long = {str(path.relative_to(ROOT)): lines for path in files if (lines := len(path.read_text().splitlines())) > 500}
    assert long == {}
