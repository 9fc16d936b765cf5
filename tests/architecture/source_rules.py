"""What the architecture test checks, as functions from source text to findings (`file:line:
what is wrong`).
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

F2 = "data model optim checkpoint monitor guard tracking quickstart"
F5 = "launch tools checkpoint_tools"
TOOLS = {
    "evaluate": "adapter_names checkpoint config data errors model run runtime tracking weights",
    "plan": "batch checkpoint config errors launch model optim run runtime",
    "verify": "checkpoint config data errors launch mirror model run runtime tracking",
}
"""Each tool, and the packages it may import beside itself: readers of what a run leaves, and
what it measures.
"""
SYNC_METHODS = ("item", "cpu", "tolist", "numpy", "nonzero")
PICKLE_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve")
PICKLE_LOADERS = ("load", "loads", "Unpickler")

Sources = dict[str, str]
"""Dotted module name -> source text."""


@dataclass(frozen=True)
class Place:
    """Where a module stands: its floor, and the package that may know itself."""

    floor: int
    group: str


def place_of(module: str) -> Place:
    """Raises `ValueError` for a file that has no floor yet: docs/architecture.md says where
    packages stand.
    """
    parts = module.split(".")
    if len(parts) == 1:
        return Place(0, "trainer")
    head = parts[1]
    floors = {"config": 0, "errors": 0, "progress": 0, "metrics": 0}
    ones = (
        "batch",
        "losses",
        "weights",
        "weight_files",
        "sampled_weights",
        "adapter_names",
        "runtime",
        "detection",
    )
    floors |= dict.fromkeys(ones, 1)
    floors |= {"loop": 3, "mirror": 3, "report": 3, "run": 4}
    if head in floors:
        return Place(floors[head], head)
    if head in F2.split():
        return Place(2, head)
    if head in ("__main__", "api", "cli", *F5.split()):
        return Place(5, "entry")
    raise ValueError(
        f"{module} stands on no floor: put it into a known package, or extend this table"
    )


def module_name(relative_path: str) -> str:
    """`trainer/data/rows.py` -> `trainer.data.rows`; a package's `__init__.py` is the package."""
    return relative_path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    is_top_level: bool


def imports_of(module: str, source: str, known: Iterable[str]) -> list[Import]:
    """Every import of a file, inside functions too; `from package import name` means `package.name`
    where that is one of the `known` modules. Implied imports of parent packages do not count.
    """
    known = set(known)
    tree = ast.parse(source)
    at_start = [
        node for node in tree.body if not isinstance(node, _SCOPES) and not _is_for_types(node)
    ]
    top_level = {id(inner) for node in at_start for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        found += [
            Import(t, node.lineno, id(node) in top_level) for t in _targets(node, module, known)
        ]
    return found


def _is_for_types(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:` never runs."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _targets(node: ast.AST, module: str, known: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parent = module.split(".")[: -node.level] or [module]
            base = ".".join([*parent, *([base] if base else [])])
        return [name if (name := f"{base}.{alias.name}") in known else base for alias in node.names]
    if (
        isinstance(node, ast.Call)
        and _dotted(node.func).endswith(("import_module", "__import__"))
        and node.args
    ):
        first = node.args[0]
        return (
            [first.value]
            if isinstance(first, ast.Constant) and isinstance(first.value, str)
            else []
        )
    return []


def upward_imports(sources: Sources) -> list[str]:
    """Imports of a higher floor, or of a neighbour on the same one."""
    found = []
    for module, source in sources.items():
        place = place_of(module)
        for item in imports_of(module, source, sources):
            if item.target.split(".")[0] != "trainer" or item.target == "trainer":
                continue
            other = place_of(item.target)
            if other.floor > place.floor:
                found.append(
                    f"{module}:{item.line}: F{place.floor} imports {item.target} of F{other.floor}"
                )
            elif other.floor == place.floor and other.group != place.group:
                found.append(
                    f"{module}:{item.line}: {place.group} knows its neighbour {item.target}"
                )
    return found


def misplaced_tools(sources: Sources) -> list[str]:
    """Imports of a tool from outside of `tools/` and `cli/`, and imports of a tool that its
    list does not name.
    """
    found = []
    for module, source in sources.items():
        parts = module.split(".")
        own = parts[2] if parts[1:2] == ["tools"] and len(parts) > 2 else None
        for item in imports_of(module, source, sources):
            target = item.target.split(".")
            if target[0] != "trainer" or len(target) < 2:
                continue
            tool = target[2] if target[1] == "tools" and len(target) > 2 else None
            if own is None and tool is not None and parts[1] != "cli":
                found.append(f"{module}:{item.line}: only cli/ imports the tool {tool}")
            if own is not None and tool not in (None, own):
                found.append(f"{module}:{item.line}: the tool {own} imports the tool {tool}")
            if own is not None and tool is None and target[1] not in TOOLS[own].split():
                found.append(f"{module}:{item.line}: the tool {own} may not import {item.target}")
    return found


def import_cycles(sources: Sources) -> list[str]:
    """Cycles between files, each as `a -> b -> a`."""
    graph = {
        module: sorted({item.target for item in imports_of(module, source, sources)} & set(sources))
        for module, source in sources.items()
    }
    found: list[str] = []
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in graph[module]:
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    return found


def torch_at_import(module: str, sources: Sources) -> list[str]:
    """How importing `module` would import torch (or transformers, which does), as a chain of
    files.
    """
    found: list[str] = []
    seen: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name.split(".")[0] in ("torch", "transformers", "torchdata"):
            found.append(" -> ".join([*path, name]))
        elif name in sources and name not in seen:
            seen.add(name)
            parents = [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)]
            targets = [
                item.target
                for item in imports_of(name, sources[name], sources)
                if item.is_top_level
            ]
            for target in [*parents, *targets]:
                visit(target, (*path, name))

    visit(module, ())
    return found


def device_waits(source: str) -> list[tuple[str, int]]:
    """(qualified function, line) of every call that makes the host wait for the device."""
    return [
        (owner, node.lineno)
        for owner, node in _with_owner(ast.parse(source))
        if _is_device_wait(node)
    ]


def _is_device_wait(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "synchronize":
        return True
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    if node.func.attr in SYNC_METHODS:
        return True
    moved_to = [
        *node.args[:1],
        *(keyword.value for keyword in node.keywords if keyword.arg == "device"),
    ]
    return node.func.attr == "to" and any(
        isinstance(a, ast.Constant) and a.value == "cpu" for a in moved_to
    )


def _with_owner(tree: ast.AST, owner: str = "<module>") -> Iterator[tuple[str, ast.AST]]:
    """Every node with the outermost function or the method it stands in."""
    for child in ast.iter_child_nodes(tree):
        inner = owner
        if isinstance(child, _SCOPES) and (
            owner == "<module>" or (owner[0].isupper() and "." not in owner)
        ):
            inner = child.name if owner == "<module>" else f"{owner}.{child.name}"
        yield inner, child
        yield from _with_owner(child, inner)


def unsafe_loads(name: str, source: str) -> list[str]:
    """Calls that would run what a file says: pickles, and code that comes with a model."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if reason := _unsafe(node):
            found.append(f"{name}:{getattr(node, 'lineno', 0)}: {reason}")
    return found


def _unsafe(node: ast.AST) -> str | None:
    if isinstance(node, ast.ImportFrom):
        hidden = [alias.name for alias in node.names if alias.name in PICKLE_LOADERS]
        return (
            f"write {node.module}.{hidden[0]} out"
            if hidden and node.module in (*PICKLE_MODULES, "torch")
            else None
        )
    if not isinstance(node, ast.Call):
        return None
    called = _dotted(node.func)
    keywords = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
    owner, _, leaf = called.rpartition(".")
    if called == "torch.load" and keywords.get("weights_only") is not True:
        return "torch.load without weights_only=True runs code from the file"
    if owner in PICKLE_MODULES and leaf in PICKLE_LOADERS:
        return f"{called} runs code from the file"
    if called in ("eval", "exec"):
        return f"{called} runs text as code"
    for keyword in ("trust_remote_code", "allow_pickle"):
        if keywords.get(keyword) is True:
            return f"{keyword}=True is the user's decision, never the program's"
    return None


def attributes_read(source: str) -> set[str]:
    """`owner.name` for every attribute that is read, with the last part of the owner:
    `self.config.data.lr` gives `self.config`, `config.data` and `data.lr`.
    """
    return {
        f"{_dotted(node.value).rpartition('.')[2]}.{node.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def text_without_encoding(path: str, source: str) -> Iterator[str]:
    """Calls that read or write text in whatever encoding the locale has. What talks to other
    programs may do so.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _needs_encoding(node):
            yield f'{path}:{node.lineno}: text without encoding="utf-8"'


def _needs_encoding(call: ast.Call) -> bool:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    name, is_method = _leaf(call.func), isinstance(call.func, ast.Attribute)
    if "encoding" in keywords or None in keywords:
        return False
    if name in ("read_text", "write_text"):
        return is_method and len(call.args) <= (name == "write_text")
    if name not in ("open", "fdopen") or _dotted(call.func) == "os.open":
        return False
    position = 0 if is_method and name == "open" else 1
    mode = keywords.get("mode", call.args[position] if len(call.args) > position else None)
    if mode is None:
        return not is_method or "newline" in keywords
    return (
        isinstance(mode, ast.Constant)
        and isinstance(mode.value, str)
        and set(mode.value) <= set("rwaxt+")
    )


def _leaf(node: ast.AST) -> str:
    """The last part of a name: of `self.buffers.wait` and `made().wait`, `wait`."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )
