"""Who may import whom, how long a module may be, and what `import dynamiq` must not do."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Rule:
    """What one part of dynamiq may use besides itself and the standard library.

    Names stand for all that is below them, and "*" for everything.
    """

    dynamiq: str = ""
    third_party: str = ""
    never: str = ""
    inside: dict[str, str] = field(default_factory=dict)
    """Name → the only function in which it may be used; "*" for any function."""


# The table of CONTRIBUTING.md. The longest key that fits a module counts.
RULES = {
    "core": Rule(third_party="torch pydantic", never="torch.distributed"),
    "topologies": Rule("core", "pydantic"),
    "transports": Rule("core", "torch"),
    "kernels": Rule("core", "torch", never="torch.distributed"),
    "kernels.nvrtc": Rule("core", "torch", inside={"cuda": "*"}),
    "kernels.sass": Rule("core", inside={"cuda": "*"}),
    "kernels.launch": Rule("core", "torch", inside={"cuda": "*"}),
    "compressors": Rule("core kernels", "torch pydantic", never="torch.distributed"),
    "pipeline": Rule("core", "torch pydantic", inside={"dynamiq.integrations.ddp": "ddp_hook"}),
    "pipeline.pipeline": Rule(
        "core planner.profiles.spectrum",
        "torch pydantic",
        inside={"dynamiq.integrations.ddp": "ddp_hook"},
    ),
    "pipeline.capture": Rule(
        "core planner.profiles.spectrum",
        "torch",
        inside={"dynamiq.planner.errors.observation": "*"},
    ),
    "planner": Rule("core compressors topologies", "torch pydantic", never="torch.cuda"),
    "planner.plan": Rule("core", "pydantic", inside={"dynamiq.pipeline": "pipeline"}),
    "planner.cost.traffic": Rule("core compressors roofline"),
    "planner.report": Rule("core", "rich"),
    "planner.plot": Rule("core", inside={"matplotlib": "*"}),
    "integrations": Rule("core pipeline", "torch", inside={"accelerate": "*", "lightning": "*"}),
    "simulation": Rule("core compressors topologies", "torch pydantic", never="torch.distributed"),
    "simulation.sources": Rule("core", "torch", inside={"safetensors": "*"}),
    "simulation.report": Rule("core", "rich"),
    "simulation.plot": Rule("core", inside={"matplotlib": "*"}),
    "probe": Rule("core compressors topologies planner", "torch pydantic"),
    "probe.report": Rule("core planner", "rich"),
    "probe.torchrun": Rule("core transports", "torch"),
    "roofline": Rule("core kernels"),
    "roofline.report": Rule("core kernels", "rich"),
    "cli": Rule("*", "typer rich"),
    "installation": Rule(),
    "": Rule("*", never="dynamiq.cli"),  # dynamiq/__init__.py
}


@dataclass(frozen=True)
class Use:
    """A dotted name that a module imports, or reaches through something it imported."""

    name: str
    line: int
    functions: tuple[str, ...]
    for_typing: bool


class Uses(ast.NodeVisitor):
    """Collects the uses of one module."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.found: list[Use] = []
        self._bound: dict[str, str] = {}
        self._functions: tuple[str, ...] = ()
        self._for_typing = False

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)
            root = alias.name.partition(".")[0]
            self._bind(alias.asname or root, alias.name if alias.asname else root)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parents = self.package.split(".")[: 1 - node.level or None] if node.level else []
        origin = ".".join([*parents, *filter(None, [node.module])])
        for alias in node.names:
            self._add(f"{origin}.{alias.name}", node)
            self._bind(alias.asname or alias.name, f"{origin}.{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names, root = [node.attr], node.value
        while isinstance(root, ast.Attribute):
            names.insert(0, root.attr)
            root = root.value
        if isinstance(root, ast.Name) and root.id in self._bound:
            self._add(".".join([self._bound[root.id], *names]), node)
        self.visit(root)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._functions = self._functions, (*self._functions, node.name)
        self.generic_visit(node)
        self._functions = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  the visitor's own naming

    def visit_If(self, node: ast.If) -> None:
        guard = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        outer, self._for_typing = self._for_typing, self._for_typing or guard
        for statement in node.body:
            self.visit(statement)
        self._for_typing = outer
        for part in (node.test, *node.orelse):
            self.visit(part)

    def _add(self, name: str, node: ast.stmt | ast.expr) -> None:
        self.found.append(Use(name, node.lineno, self._functions, self._for_typing))

    def _bind(self, local: str, name: str) -> None:
        if not self._for_typing:  # later mentions are annotations
            self._bound[local] = name


def uses_of(package: str, source: str) -> list[Use]:
    visitor = Uses(package)
    visitor.visit(ast.parse(source))
    return visitor.found


def is_below(name: str, names: str) -> bool:
    return any(above == "*" or f"{name}.".startswith(f"{above}.") for above in names.split())


def is_allowed(use: Use, part: str, rule: Rule) -> bool:
    if is_below(use.name, rule.never):
        return False
    if any(
        is_below(use.name, name)
        and (function in use.functions or (function == "*" and use.functions))
        for name, function in rule.inside.items()
    ):
        return True
    root, _, inner = use.name.partition(".")
    if root == "dynamiq":
        return is_below(inner, f"{part} {rule.dynamiq}")
    return use.for_typing or root in sys.stdlib_module_names or is_below(use.name, rule.third_party)


def violations(module: str, source: str, *, is_package: bool = False) -> Iterator[str]:
    """Yield what a module ("dynamiq.core.layout") uses against the table."""
    inner = module.partition(".")[2]
    key = max((key for key in RULES if not key or is_below(inner, key)), key=len)
    if inner and not key:
        yield f"{module} has no row in RULES"
        return
    package = module if is_package else module.rpartition(".")[0]
    for use in uses_of(package, source):
        if not is_allowed(use, inner.partition(".")[0], RULES[key]):
            yield f"{module}:{use.line} uses {use.name}"


def modules() -> dict[str, Path]:
    """Return the modules of dynamiq by dotted name."""
    paths = sorted((ROOT / "dynamiq").rglob("*.py"))
    return {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in paths
    }


MODULES = modules()
USERS = [*(ROOT / "evaluation").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]


def test_the_parts_are_found():
    parts = {name.split(".")[1] for name in MODULES if name.count(".") > 1}
    assert parts >= {"core", "topologies", "compressors", "kernels", "transports"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_table(module):
    path = MODULES[module]
    is_package = path.name == "__init__.py"
    assert not list(violations(module, path.read_text("utf-8"), is_package=is_package))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_holds_one_idea(module):
    lines = MODULES[module].read_text("utf-8").count("\n")
    assert lines <= 350


@pytest.mark.parametrize("path", USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_users_import_public_names_only(path):
    names = [use.name for use in uses_of("evaluation", path.read_text("utf-8"))]
    inner = [name for name in names if is_below(name, "dynamiq") and "._" in name]
    assert not inner
    assert not [name for name in names if is_below(name, "dynamiq.cli")]


LEGAL = [
    ("core.layout", "import math, torch\nfrom torch import Tensor\nfrom .message import Message"),
    ("core.layout", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rich"),
    ("topologies.ring", "from ..core import topology\nfrom dynamiq.core.message import Message"),
    ("kernels.nvrtc", "def build():\n    from cuda.core import Program\n    Program.x"),
    ("pipeline", "def ddp_hook(): from dynamiq.integrations.ddp import Hook"),
    ("planner.report", "import rich.table"),
    ("planner.plan", "def pipeline(): from dynamiq.pipeline import Pipeline"),
    ("planner.cost.traffic", "from dynamiq.roofline.families import traffic"),
    ("simulation.plot", "def draw():\n    from matplotlib.figure import Figure"),
    ("integrations.lightning", "def plugin():\n    import lightning"),
    ("cli.plan", "import typer\nfrom dynamiq.planner import search"),
    ("compressors.mine.scales", "from ...core import layout\nfrom . import allocation"),
]
ILLEGAL = [
    ("core.layout", "from dynamiq.kernels.supergroups import ops"),
    ("core.layout", "from .. import kernels"),
    ("core.layout", "from dynamiq import Pipeline"),
    ("core.layout", "def f():\n    from ..pipeline import Pipeline"),
    ("core.layout", "import typing\nif typing.TYPE_CHECKING:\n    import dynamiq.pipeline"),
    ("core.layout", "if TYPE_CHECKING:\n    pass\nelse:\n    import rich"),
    ("core.layout", "import torch.distributed as dist"),
    ("core.layout", "from torch import distributed"),
    ("core.layout", "import torch\ndef f(): return torch.distributed.get_rank()"),
    ("core.layout", "import torch\ndef f(): return torch.distributed.get_rank().bit_length()"),
    ("core.layout", "import numpy"),
    ("core.layout", "import torchvision"),
    ("topologies.ring", "from torch import Tensor"),
    ("transports.nccl", "from dynamiq.topologies.ring import Ring"),
    ("kernels.nvrtc", "import cuda.core"),
    ("kernels.host", "def f(): import cuda.core"),
    ("compressors.mine.scales", "from ...topologies import ring"),
    ("pipeline", "def all_reduce(): from dynamiq.integrations.ddp import Hook"),
    ("pipeline", "from dynamiq.compressors.uncompressed import Uncompressed"),
    ("planner.cost", "import torch as t\nt.cuda.synchronize()"),
    ("planner.cost", "import rich"),
    ("planner.cost", "from dynamiq.roofline.families import traffic"),
    ("planner.plan", "from dynamiq.pipeline import Pipeline"),
    ("planner.plan", "def load(): from dynamiq.pipeline import Pipeline"),
    ("simulation.plot", "from matplotlib.figure import Figure"),
    ("simulation.limit", "from dynamiq.kernels.supergroups.wire import SUPERGROUP"),
    ("integrations.lightning", "import lightning"),
    ("integrations.lightning", "def f(): from dynamiq.kernels.supergroups import ops"),
    ("", "from dynamiq.cli import main"),
    ("elsewhere", "import math"),
]


@pytest.mark.parametrize(("inner", "source"), LEGAL)
def test_the_check_accepts(inner, source):
    assert not list(violations(f"dynamiq.{inner}", source))


@pytest.mark.parametrize(("inner", "source"), ILLEGAL)
def test_the_check_refuses(inner, source):
    assert list(violations(f"dynamiq.{inner}".rstrip("."), source))


# What torch and pydantic do by themselves comes first, and is not held against dynamiq.
IMPORT_DYNAMIQ = """
import os, sys, threading
import pydantic, torch, torch.distributed

def natives():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0

def refuse_processes(event, arguments):
    if event in ("os.exec", "os.fork", "os.posix_spawn", "os.system", "subprocess.Popen"):
        raise AssertionError(f"import dynamiq starts a process: {event} {arguments}")

for package in BLOCKED:
    sys.modules[package] = None
modules, threads = set(sys.modules), (threading.active_count(), natives())
sys.addaudithook(refuse_processes)

import dynamiq

roots = {name.partition(".")[0] for name in set(sys.modules) - modules}
optional = roots & {"cuda", "matplotlib", "rich", "safetensors", "transformers", "typer"}
assert not optional, f"import dynamiq imports {optional}"
assert threads == (threading.active_count(), natives()), "import dynamiq starts a thread"
assert not torch.cuda.is_initialized(), "import dynamiq asks for a device"
"""


@pytest.mark.parametrize("blocked", [[], ["cuda", "rich"]], ids=["all", "without-cuda-and-rich"])
def test_importing_does_nothing(blocked):
    code = f"BLOCKED = {blocked}\n{IMPORT_DYNAMIQ}"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert not run.stdout + run.stderr
