"""Private parts of torch, torchdata and transformers that the code uses, and that a new version may
move.

`PRIVATE` states for each why it is used, and names a test that fails when it moves.
"""

import ast

from repository import REPOSITORY
from source_rules import tree_of

PRIVATE = {
    "torch.distributed.tensor._utils": (
        "the slice of a DTensor that a rank holds", "numerics/test_weights.py"
    ),
    "torch.utils._pytree": ("trees of tensors in states and outputs", "unit/test_snapshot.py"),
    "torch.distributed._functional_collectives": (
        "an all-to-all with a gradient", "distributed/test_sequence_parallel.py"
    ),
    "torch.distributed._tools": (
        "which tensors are weights, gradients or activations", "unit/test_memory_plan.py"
    ),
    "torch._subclasses.fake_impls": ("fake tensors of the plan", "unit/test_memory_plan.py"),
    "torch._subclasses.fake_tensor": ("fake tensors of the plan", "unit/test_memory_plan.py"),
    "torch.testing._internal.distributed.fake_pg": (
        "ranks that do not exist, for the plan", "unit/test_memory_plan.py"
    ),
    "torch.utils._python_dispatch": ("every operation of a planned step", "unit/test_memory_plan.py"),
    "_local_tensor": ("the shard of a DTensor without a copy", "distributed/test_checkpoint.py"),
    "_spec": ("the placement of a DTensor that is read back", "distributed/test_checkpoint.py"),
    "_cdata": ("which storages are the same", "unit/test_memory_plan.py"),
    "_shutdown_workers": ("loader workers end with the loader", "unit/test_loader.py"),
    "_dynamo": ("the error of a layer that is not one graph", "numerics/test_parallelize.py"),
    "_softmax_backward_data": ("the gradient of CPU attention", "numerics/test_attention.py"),
    "_buffers": ("buffers keep their values on meta", "numerics/test_weights.py"),
    "_parameters": ("adapters beside frozen weights", "numerics/test_adapters.py"),
    "_grouped_mm": ("products of experts", "numerics/test_experts.py"),
    "_grouped_linear": ("adapters of experts", "numerics/test_adapters.py"),
    "_apply_gate": ("adapters of experts", "numerics/test_adapters.py"),
    "_scaled_dot_product_flash_attention": ("kept by recomputation", "numerics/test_parallelize.py"),
    "_scaled_dot_product_efficient_attention": (
        "kept by recomputation", "numerics/test_parallelize.py"
    ),
    "_scaled_dot_product_cudnn_attention": ("kept by recomputation", "numerics/test_parallelize.py"),
    "_scaled_dot_product_flash_attention_for_cpu": (
        "kept by recomputation", "numerics/test_parallelize.py"
    ),
    "_varlen_attn": ("kept by recomputation", "numerics/test_parallelize.py"),
    "_set_gradient_checkpointing": ("recomputation by a function", "numerics/test_parallelize.py"),
    "_get_fsdp_state": ("the dtype in which gradients are reduced", "numerics/test_parallelize.py"),
    "_fsdp_param_groups": ("the same", "numerics/test_parallelize.py"),
    "_orig_dtype": ("the same", "numerics/test_parallelize.py"),
    "_inductor": ("the type of an error of the compiler", "numerics/test_assemble.py"),
    "_keys_to_ignore_on_load_missing": (
        "tensors that transformers itself ignores", "distributed/test_extra_tensors.py"
    ),
    "_attn_implementation": ("the eager reference of the self-check", "numerics/test_selfcheck.py"),
    "_experts_implementation": ("the eager reference of the self-check", "numerics/test_selfcheck.py"),
    "_weight_conversions": ("how files store fused tensors", "numerics/test_weights.py"),
    "_foreach_norm": ("norms of all gradients in one launch", "unit/test_optim.py"),
    "_set_pg_timeout": ("a longer wait before the first step", "distributed/test_start.py"),
    "_get_default_store": ("what ranks tell each other without a group", "distributed/test_start.py"),
    "_is_avx512_bf16_supported": ("whether this CPU multiplies bfloat16", "unit/test_environment.py"),
}  # fmt: skip
MOST = 40


def uses():
    """Return private modules and names of libraries that the code imports or uses."""
    paths = (REPOSITORY / "trainer").rglob("*.py")
    nodes = [node for path in paths for node in ast.walk(tree_of(path.read_text("utf-8")))]
    own = set()
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            (own if isinstance(node.ctx, ast.Store) else found).add(name)
        elif isinstance(node, ast.ImportFrom) and not f"{node.module}".startswith("trainer"):
            is_private = "._" in f"{node.module}"
            found |= {f"{node.module}"} if is_private else {one.name for one in node.names}
    found -= own - PRIVATE.keys()
    is_name = {name for name in found if name.startswith("_") and not name.startswith("__")}
    return {name for name in found if "._" in name} | is_name - {"_exit"}


def test_each_private_part_has_a_reason_and_a_test():
    assert uses() == PRIVATE.keys()
    assert len(PRIVATE) < MOST
    missing = {test for _, test in PRIVATE.values() if not (REPOSITORY / "tests" / test).is_file()}
    assert missing == set()
