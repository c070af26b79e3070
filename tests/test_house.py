"""The house in order: imports go one way, the README's code runs, its tree is the one on the disk."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()

# A room may import from itself and from those before it.
ROOMS = [
    "ops", "layers", "weights", "models", "heads", "data", "checkpoint", "transfer", "streaming", "bench", "evaluate",
    "answers", "viz", "predict", "export", "train", "demo", "serve", "cli",
]  # fmt: skip


def imported_rooms(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vir":
            parts = node.module.split(".")[1:]
            names |= {parts[0]} if parts else {alias.name for alias in node.names}
    return names & set(ROOMS)


@pytest.mark.parametrize("file", sorted((ROOT / "vir").rglob("*.py")), ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_one_way(file: Path) -> None:
    room = file.relative_to(ROOT / "vir").parts[0].removesuffix(".py")
    if room not in ("__init__", "__main__"):
        assert room in ROOMS, f"a new room {room}: give it its place in ROOMS"
        allowed = set(ROOMS[: ROOMS.index(room) + 1])
        assert imported_rooms(file) <= allowed


@pytest.mark.parametrize("number", range(len(re.findall(r"```python\n", README))))
def test_code_in_the_readme_runs(number: int) -> None:
    block = re.findall(r"```python\n(.*?)```", README, re.S)[number]
    exec(compile(block, f"README block {number}", "exec"), {})


def test_the_readme_has_code() -> None:
    assert "```python" in README


def paths_in_the_tree(text: str) -> set[str]:
    tree = re.search(r"```text\n(vir/\n.*?)```", text, re.S)
    assert tree is not None
    written, folders = set(), [""]
    for line in tree.group(1).splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2
        path = folders[depth - 1] + line.split()[0]
        folders[depth:] = [path]
        written.add(path)
    return written


def test_trees_of_the_documents_are_the_tree_on_the_disk() -> None:
    package = ROOT / "vir"
    files = {f.relative_to(package) for f in package.rglob("*.py")}
    on_disk = {str(f) for f in files if f.name != "__init__.py"}
    on_disk |= {f"{f.parent}/" for f in files if f.parent.name}
    assert paths_in_the_tree(CONTRIBUTING) == on_disk
    rooms = {path for path in on_disk if "/" not in path.rstrip("/")}
    assert paths_in_the_tree(README) == rooms - {"__main__.py"}


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"make ([\w-]+)", README))
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), f"the README names make {target}"


def anchors(document: Path) -> set[str]:
    """What GitHub makes of headings."""
    heads = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "RESULTS.md",
        "CONTRIBUTING.md",
        "results/README.md",
        "results/LIMITS.md",
        "results/earlier/README.md",
        "runs/kept/README.md",
    ],
)
def test_links_of_documents_lead_somewhere(name: str) -> None:
    document = ROOT / name
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    for link in links:
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            assert target.exists(), f"{name} links to {link}"
            assert not anchor or anchor in anchors(target), f"{name} links to {link}"
