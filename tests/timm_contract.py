"""Run timm's own model tests, from the sources of the installed release, on our models: `make timm-tests`.

Not part of `make test`: it fetches timm's source archive and takes many minutes. Left out are its TorchScript tests:
our models are made for torch.compile and torch.export.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import timm

import vir  # noqa: F401  (registers the models)

SETTINGS = """
import vir
FEAT_INTER_FILTERS += ['vir', 'hvir']
NON_STD_FILTERS += ['vir_*']
"""


def fetch_tests(folder: Path) -> Path:
    """timm's test_models.py with our models among those it knows."""
    wanted = f"timm=={timm.__version__}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "timm", wanted]
    subprocess.run(pip, cwd=folder, check=True)
    with tarfile.open(next(folder.glob("timm-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    tests = next(folder.glob("timm-*/tests/test_models.py"))
    source = tests.read_text()
    marker = "NUM_NON_STD = len(NON_STD_FILTERS)"
    if marker not in source:
        raise SystemExit(f"timm {timm.__version__} arranges its tests in another way: look for its model filters.")
    ours = folder / "test_models_ours.py"
    ours.write_text(source.replace(marker, SETTINGS + marker, 1))
    return ours


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        tests = fetch_tests(Path(folder))
        select = [
            "-k",
            "vir_ and not torchscript",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            "-c",
            "/dev/null",
        ]
        return subprocess.run([sys.executable, "-m", "pytest", "-q", str(tests), *select, *sys.argv[1:]]).returncode


if __name__ == "__main__":
    raise SystemExit(main())
