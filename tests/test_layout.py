"""The layout of the project: dependencies point one way, names resolve to this project."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "operators", "jobs", "deploy")
ALLOWED = {"schemas": {"schemas"}, "operators": {"operators", "schemas"}, "jobs": {"jobs", "operators", "schemas"},
           "deploy": {"deploy", "operators", "schemas"}}
LIGHT = {"pyarrow", "pydantic", "pydantic_settings"}  # all that schemas may ask for beside the standard library


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).glob("*.py"))


def imports(path: Path, *, lazy: bool) -> set[str]:
    """Top-level names a module imports; with `lazy`, those inside functions too."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if lazy else (n for b in tree.body for n in ([b] if not isinstance(b, ast.FunctionDef | ast.ClassDef) else []))
    out = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            out |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            out.add(node.module.split(".")[0])
    return out


@pytest.mark.parametrize("path", [p for package in PACKAGES for p in modules(package)], ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_dependencies_point_one_way(path):
    package = path.parent.name
    ours = imports(path, lazy=package != "jobs") & set(PACKAGES)
    assert ours <= ALLOWED[package], "jobs imports deploy inside functions only" if package == "jobs" else ""
    assert "tests" not in imports(path, lazy=True)


def test_schemas_stay_light():
    for path in modules("schemas"):
        foreign = {m for m in imports(path, lazy=True) if m not in sys.stdlib_module_names} - set(PACKAGES)
        assert foreign <= LIGHT, path.name


def test_no_job_shadows_a_standard_module():
    """`flink run -py jobs/generate.py` puts jobs/ first on the path."""
    assert not {p.stem for p in modules("jobs")} & set(sys.stdlib_module_names)


def test_names_resolve_to_this_project():
    code = f"import json; print(json.dumps([__import__(n).__file__ for n in {PACKAGES}]))"
    found = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout)
    assert [Path(f).parent.parent for f in found] == [ROOT] * len(PACKAGES)


def test_nothing_is_pickled():
    for path in (p for package in PACKAGES for p in modules(package)):
        assert not {"pickle", "cloudpickle", "dill"} & imports(path, lazy=True), path
