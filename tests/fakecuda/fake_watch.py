"""Records the work that each operation on fake CUDA tensors causes on the device and on the host."""

import inspect
import sys
from collections import Counter
from pathlib import Path

import fake_cuda
import fake_kernels
import torch
from kernel_terms import insist
from repository import REPOSITORY
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default", "masked_select", "unique")
"""Parts of the names of operations whose result the host needs."""
NO_KERNEL = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "_unsafe_view",
    "detach",
    "lift_fresh",
)
_VARLEN = inspect.signature(varlen._varlen_attn._init_fn)
UPDATES = ("aten._fused_adamw_.",)
COLLECTIVES = ("c10d.", "_c10d_functional.")
NO_COLLECTIVES = ("_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor")


class Watch(TorchDispatchMode):
    """Counts operations. Records reads on the host, copies between devices, and collectives."""

    def __init__(self, *, answer=None):
        """`answer`: the value that the host reads at a place. None: a fake tensor has no value."""
        super().__init__()
        self._answer = answer
        self.phase = ""
        self.operations = Counter()
        self.num_kernels = 0
        self.reads = Counter()
        self.copies = []
        self.collectives = []

    @classmethod
    def ignore_compile_internals(cls):
        """Compiled code still runs as compiled code under this mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        kwargs = kwargs or {}
        is_mask = name == "aten.index.Tensor" and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if (is_mask or any(word in name for word in READS)) and args[0].device.type == "cuda":
            where = _where()
            self.reads[f"{self.phase} {name} at {where}".lstrip()] += 1
        is_number = name == "aten._local_scalar_dense.default" and isinstance(args[0], FakeTensor)
        if is_number and self._answer is not None:  # also of sums that a packet brought to the host
            return self._answer(_where())
        if name == "torch_attn._varlen_attn.default":
            _insist(*args)
        if name.startswith(UPDATES):
            fake_cuda.called("update")
        result = func(*args, **kwargs)
        if name == "prim.device.default":
            return result
        self.operations[name] += 1
        self.num_kernels += num_kernels(func)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if kwargs.get("pin_memory"):
            result.pin_memory()
        if name in ("aten._to_copy.default", "aten.copy_.default"):
            self._note_copy(name, args, kwargs, inputs, outputs)
        elif name.startswith(COLLECTIVES) and not name.startswith(NO_COLLECTIVES):
            self._note_collective(name, args, kwargs)
        return result

    def _note_copy(self, name, args, kwargs, inputs, outputs):
        if name == "aten.copy_.default":
            source = args[1]
            target = args[0]
            is_async = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        else:
            source = inputs[0]
            target = outputs[0]
            is_async = bool(kwargs.get("non_blocking"))
        if {source.device.type, target.device.type} == {"cpu", "cuda"}:
            host = source if source.device.type == "cpu" else target
            if name == "aten._to_copy.default" and host is target and is_async:
                host.pin_memory()  # as torch allocates it
            way = f"{source.device.type} to {target.device.type}"
            fake_cuda.called(f"copy {way}")
            self.copies.append(
                {
                    "phase": self.phase,
                    "way": way,
                    "how": "async" if is_async else "blocking",
                    "host": "pinned" if _is_pinned(host) else "pageable",
                    "where": _where(),
                    "bytes": source.nbytes,
                    "stream": torch.cuda.current_stream().number,
                }
            )

    def _note_collective(self, name, args, kwargs):
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        groups = [
            leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and _is_group(leaf)
        ]
        if groups:
            num_ranks = ProcessGroup.unbox(groups[0]).size()
        else:  # functional ones name theirs, behind all else
            num_ranks = _resolve_process_group(
                next(leaf for leaf in reversed(leaves) if isinstance(leaf, str))
            ).size()
        largest = max(tensors, key=lambda tensor: tensor.numel())
        kind = name.split(".")[1].strip("_")
        self.collectives.append(
            {
                "phase": self.phase,
                "kind": kind,
                "dtype": str(largest.dtype).removeprefix("torch."),
                "numel": largest.numel(),
                "ranks": num_ranks,
                "device": largest.device.type,
            }
        )


def num_kernels(func):
    """Count the kernels of the device. Views, allocations and notes of the profiler launch none."""
    name = func.name().split(".")[0]
    if (
        name.startswith(("c10d::", "_c10d_functional::", "profiler::"))
        or name.split("::")[1] in NO_KERNEL
    ):
        return 0
    aliases = [result.alias_info for result in func._schema.returns]
    if aliases and all(alias is not None and not alias.is_write for alias in aliases):
        return 0
    return fake_kernels.NUM_KERNELS.get(name, 1)


def _is_group(leaf):
    return "ProcessGroup" in leaf._type().qualified_name()


def _where():
    """Return the innermost lines of the trainer that led here."""
    frame = sys._getframe(2)
    found = list[str]()
    while frame is not None and len(found) < 2:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(REPOSITORY / "trainer"):
            found.append(f"{path.relative_to(REPOSITORY)}:{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found) or "torch"


def _is_pinned(host):
    if host.untyped_storage() in fake_cuda.PINNED:
        return True
    return not isinstance(host, FakeTensor) and fake_cuda.is_locked(host.data_ptr(), host.nbytes)


def _insist(*args):
    """The terms of the kernel, of what `varlen_attn` hands to its operation."""
    given = _VARLEN.bind(*args)
    given.apply_defaults()
    found = given.arguments
    bounds = found["cu_seq_q"], found["cu_seq_k"]
    window = tuple(found["window_size"])
    insist(*args[:3], *bounds, window=window, enable_gqa=found["enable_gqa"])
