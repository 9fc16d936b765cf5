"""The rules of the architecture test, as functions from source text to findings (`file:line:
problem`).
"""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter

CORE = "errors config runtime tracking quickstart data model optim checkpoint train"
"""Packages of the core, from the bottom up: each imports only earlier ones."""
ENTRIES = "__main__ api cli launch tools"
"""Packages on top of the core. They may import each other, subject to the rule for tools."""
FLOORS = {name: floor for floor, name in enumerate(CORE.split())}
FLOORS |= dict.fromkeys(ENTRIES.split(), len(FLOORS)) | {"trainer": 0}
TOOLS = {
    "evaluate": "checkpoint config data errors model runtime tracking train.start",
    "mirror": "checkpoint config errors runtime tracking",
    "plan": "checkpoint config data errors launch model optim runtime train.start",
    "report": "checkpoint config errors runtime tracking train.detection",
    "verify": "checkpoint config data errors launch model runtime tracking train.start",
}
"""Each tool, and the packages that it may import in addition to itself: readers of a run's files,
and what it measures.
"""
SYNC_METHODS = ("item", "cpu", "tolist", "numpy", "nonzero")
PICKLE_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve")
PICKLE_LOADERS = ("load", "loads", "Unpickler")

Sources = dict[str, str]
"""Dotted module name -> source text."""


def floor_of(module):
    """Raise `KeyError` for a package that has no level yet. docs/architecture.md names the levels."""
    _, _, inner = module.partition(".")
    return FLOORS[inner.split(".")[0] or "trainer"]


def module_name(relative_path):
    """Return the module name of a file: `trainer/data/rows.py` -> `trainer.data.rows`. The
    `__init__.py` of a package is the package.
    """
    return relative_path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@cache
def tree_of(source):
    return ast.parse(source)


def imports_of(module, source, known):
    """Yield (target, line) of every import in a file, even inside functions.

    `from package import name` means `package.name` if that is one of the `known` modules. Implied
    imports of parent packages do not count.
    """
    names = set(known)
    nodes = ast.walk(tree_of(source))
    return [(t, node.lineno) for node in nodes for t in _targets(node, module, names)]


def _targets(node, module, known):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.module is not None and node.level == 0, f"{module}: a relative import"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name in known else node.module for name in names]
    if isinstance(node, ast.Call) and _dotted(node.func).endswith(("import_module", "__import__")):
        return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []


def wrong_imports(sources):
    """Return imports of a package on a higher level, imports of a tool from outside `cli/`, and
    imports of a tool that its list does not contain.
    """
    found = []
    for module, source in sources.items():
        tool = _tool_of(module)
        for target, line in imports_of(module, source, sources):
            if not target.startswith("trainer."):
                continue
            if tool is not None:
                names = (f"tools.{tool}", *TOOLS[tool].split())
                is_right = any(f"{target}.".startswith(f"trainer.{name}.") for name in names)
            elif _tool_of(target) is not None:
                is_right = module.startswith("trainer.cli")
            else:
                is_right = floor_of(target) <= floor_of(module)
            if not is_right:
                found.append(f"{module}:{line}: may not import {target}")
    return found


def _tool_of(module):
    """Return the tool that a module belongs to."""
    _, _, inner = module.partition("trainer.tools.")
    return inner.split(".")[0] or None


def import_cycle(sources):
    """Return a cycle between files; empty if there is none."""
    graph = {
        module: {target for target, _ in imports_of(module, source, sources)} & sources.keys()
        for module, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def device_waits(source):
    """Yield (qualified function, line) of every call that makes the host wait for the device."""
    return [
        (owner, node.lineno)
        for owner, node in _with_owner(tree_of(source))
        if _is_device_wait(node)
    ]


def _is_device_wait(node):
    if isinstance(node, ast.Attribute):
        return node.attr == "synchronize"
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    is_to_cpu = any(isinstance(value, ast.Constant) and value.value == "cpu" for value in values)
    return node.func.attr in SYNC_METHODS or (node.func.attr == "to" and is_to_cpu)


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _with_owner(tree, owner="<module>"):
    """Yield every node with the outermost function or method that contains it."""
    for child in ast.iter_child_nodes(tree):
        inner = owner
        if isinstance(child, _SCOPES) and (
            owner == "<module>" or (owner[0].isupper() and "." not in owner)
        ):
            inner = child.name if owner == "<module>" else f"{owner}.{child.name}"
        yield inner, child
        yield from _with_owner(child, inner)


def unsafe_loads(name, source):
    """Yield calls that would run code from a file: pickles, and code that comes with a model."""
    found = []
    for node in ast.walk(tree_of(source)):
        if reason := _unsafe(node):
            found.append(f"{name}:{getattr(node, 'lineno', 0)}: {reason}")
    return found


def _unsafe(node):
    if isinstance(node, ast.ImportFrom) and node.module in (*PICKLE_MODULES, "torch"):
        hidden = {alias.name for alias in node.names} & set(PICKLE_LOADERS)
        return f"write {node.module}.{hidden.pop()} out" if hidden else None
    if not isinstance(node, ast.Call):
        return None
    called = _dotted(node.func)
    keywords = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
    owner, _, leaf = called.rpartition(".")
    if called == "torch.load" and keywords.get("weights_only") is not True:
        return "torch.load without weights_only=True runs code from the file"
    if called in ("eval", "exec") or (owner in PICKLE_MODULES and leaf in PICKLE_LOADERS):
        return f"{called} runs code"
    if keywords.get("trust_remote_code") is True or keywords.get("allow_pickle") is True:
        return "to run code of a file is the user's decision, never the program's"
    return None


def attributes_read(source):
    """Yield `owner.name` for every attribute that is read, with the last part of the owner.

    `self.config.data.lr` gives `self.config`, `config.data` and `data.lr`.
    """
    return {
        f"{_dotted(node.value).rpartition('.')[2]}.{node.attr}"
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def _dotted(node):
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""
