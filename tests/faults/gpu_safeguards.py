"""The safeguards of the CUDA paths: the finding of docs/gpu.md that each one fixes, and how to
remove it (see mutations.py).
"""

from safeguards import Mutation

ATTENTION = "model/attention.py"
SHARDING = "model/parallelize.py"
SNAPSHOT = "checkpoint/snapshot.py"
MANAGER = "checkpoint/manager.py"
RANKS = "launch/ranks.py"
WORLD = "runtime/distributed.py"
KERNEL = "numerics/test_cuda_attention.py"
STEP = "fakecuda/test_fake_step.py"
WHOLE = "fakecuda/test_fake_whole_run.py"
PARALLEL = "numerics/test_parallelize.py"
HEAD = "model/head.py"
MACHINE = "unit/test_launch_machine.py"
COPY = "unit/test_snapshot.py"
SPEED = "unit/test_speed.py"

GPU_SAFEGUARDS = (
    Mutation(
        "GPU 1: values narrower than queries go to the kernel as they are",
        ATTENTION,
        "    missing = head_size - heads.shape[-1]\n",
        "    missing = 0\n",
        f"{KERNEL}::test_head_sizes_that_the_kernel_lacks_give_the_same_numbers",
    ),
    Mutation(
        "GPU 1: heads too large for the kernel go to it",
        ATTENTION,
        "_kernel_head_size(query, value) <= MAX_HEAD_SIZE and ",
        "",
        f"{KERNEL}::test_head_sizes_that_the_kernel_lacks_give_the_same_numbers",
    ),
    Mutation(
        "GPU 2: the thread of a save stands on device 0",
        SNAPSHOT,
        "            torch.cuda.set_device(self._device)",
        "            pass",
        f"{COPY}::test_a_thread_waits_for_the_copy_on_the_device_of_the_state",
    ),
    Mutation(
        "GPU 2: the same, on fake CUDA tensors",
        SNAPSHOT,
        "            torch.cuda.set_device(self._device)",
        "            pass",
        f"{WHOLE}::test_every_thread_stands_on_its_own_card_and_no_copy_is_written_before_it_is_there",
    ),
    Mutation(
        "GPU 3: documents longer than the rotary limit are packed",
        "model/packed_lm.py",
        "    if limit is not None and max_length > limit:\n",
        "    if False:\n",
        "numerics/test_rope.py::test_packing_above_the_limit_is_refused_and_auto_says_why",
    ),
    Mutation(
        "GPU 4: page-locked memory comes in powers of two",
        SNAPSHOT,
        "            size_bytes += num_units * ALIGNMENT_BYTES\n",
        "            size_bytes += max(ALIGNMENT_BYTES, 1 << (shape.numel() * dtype.itemsize - "
        "1).bit_length())\n",
        f"{COPY}::test_one_block_of_the_size_of_the_state_is_page_locked_once",
    ),
    Mutation(
        "GPU 5: gloo takes the interface that the hostname resolves to",
        RANKS,
        "        added |= gloo_interface(layout.master_addr)\n",
        "        pass\n",
        f"{MACHINE}::test_only_runs_on_several_machines_are_told_an_interface",
    ),
    Mutation(
        "GPU 6: a driver without a usable card means a run on CPUs",
        RANKS,
        '    if number == 0 and (device == "cuda" or Path(GPU_DRIVERS[0]).exists()):\n',
        '    if number == 0 and device == "cuda":\n',
        f"{MACHINE}::test_torch_counts_the_gpus_of_a_machine_with_a_driver",
    ),
    Mutation(
        "GPU 7: the meeting of the ranks has no limit",
        WORLD,
        '    heartbeat.enter("meet", limit_s=timeout_s)\n',
        "",
        "unit/test_launch_hangs.py::test_a_rank_that_never_joins_ends_the_run_with_the_stacks_of_those_who_wait",
    ),
    Mutation(
        "GPU 7: the first sum over the ranks is not checked",
        WORLD,
        "    if int(total) != size:\n",
        "    if False:\n",
        "distributed/test_groups.py::test_a_connection_that_adds_nothing_up_is_refused",
    ),
    Mutation(
        "GPU 7: two ranks share a card",
        WORLD,
        "    if shared is not None and count > 1:\n",
        "    if False:\n",
        "distributed/test_groups.py::test_two_ranks_on_one_card_are_refused",
    ),
    Mutation(
        "GPU 8: nobody is told of one core for eight ranks",
        "launch/checks.py",
        "    if launch.num_gpus and num_cores < wanted:\n",
        "    if False:\n",
        f"{MACHINE}::test_few_cores_beside_cards_are_warned_of",
    ),
    Mutation(
        "GPU 9: trainer.deterministic leaves the kernels as they are",
        "runtime/seeding.py",
        "    torch.use_deterministic_algorithms(True)\n",
        "",
        "numerics/test_assemble.py::test_an_operation_without_a_deterministic_kernel_is_named_before_training",
    ),
    Mutation(
        "GPU 9: a run does not ask for them",
        "train/start/main.py",
        "        seeding.use_deterministic_kernels()\n",
        "        pass\n",
        "unit/test_run_phases.py::test_preparation_meeting_and_loading_have_limits",
    ),
    Mutation(
        "GPU 9: trainer.deterministic leaves NCCL as it is",
        "runtime/seeding.py",
        '    os.environ.setdefault("NCCL_ALGO", "Ring")\n',
        "",
        "numerics/test_assemble.py::test_an_operation_without_a_deterministic_kernel_is_named_before_training",
    ),
    Mutation(
        "GPU 10: groups of the mesh keep torch's half hour",
        WORLD,
        "        set_timeout(timeout, group)\n",
        "        pass\n",
        "distributed/test_groups.py::test_every_group_of_the_mesh_has_the_configured_limit",
    ),
    Mutation(
        "GPU 11: selective recomputation of a compiled layer repeats products",
        SHARDING,
        "use_reentrant=False, context_fn=_selective())\n        layer",
        "use_reentrant=False)\n        layer",
        f"{PARALLEL}::test_a_compiled_backward_pass_is_the_same_and_repeats_no_product",
    ),
    Mutation(
        "GPU 11: a layer that is not one graph is left uncompiled",
        SHARDING,
        "fullgraph=is_selective)",
        "fullgraph=False)",
        f"{PARALLEL}::test_selective_recomputation_of_layers_that_are_not_one_graph_is_refused",
    ),
    Mutation(
        "GPU 11: what stays gathered is gathered anew for each micro-batch",
        SHARDING,
        "    model.set_reshard_after_backward(is_last or owner.frees_gathered)\n",
        "    model.set_reshard_after_backward(True)\n",
        f"{PARALLEL}::test_what_stays_gathered_is_gathered_once_a_step",
    ),
    Mutation(
        "GPU 12: norms are computed in pieces",
        "model/norm.py",
        '    if hidden_TH.device.type == "cuda":',
        "    if False:",
        f"{STEP}::test_kernels_of_a_layer_stay_within_their_budget",
    ),
    Mutation(
        "GPU 13: replicas add up in every micro-batch",
        SHARDING,
        "    model.set_requires_all_reduce(is_last)\n",
        "    model.set_requires_all_reduce(True)\n",
        f"{STEP}::test_replicas_add_their_gradients_once_a_step",
    ),
    Mutation(
        "GPU 15: validation batches are not page-locked",
        "data/loader.py",
        "            yield batch.pin_memory() if self._plan.pin_memory else batch\n",
        "            yield batch\n",
        f"{WHOLE}::test_no_copy_blocks_from_the_first_step_to_the_last_save",
    ),
    Mutation(
        "GPU 16: selective recomputation repeats experts",
        SHARDING,
        "        torch.ops.aten._grouped_mm,\n",
        "",
        f"{PARALLEL}::test_selective_recomputation_repeats_no_matrix_product",
    ),
    Mutation(
        "GPU 17: the head's blocks are of 1,024 positions",
        HEAD,
        "    block_size = min(BLOCK_TOKENS, 1 <<",
        "    block_size = min(1024, 1 <<",
        "numerics/test_head.py::test_blocks_are_as_long_as_the_memory_of_their_logits_allows",
    ),
    Mutation(
        "GPU 17: the gradient of the head's weight is added up in bfloat16",
        HEAD,
        "        torch.zeros_like(parameter, dtype=torch.float32)\n",
        "        torch.zeros_like(parameter)\n",
        "numerics/test_head.py::test_weight_gradient_sums_its_blocks_in_float32",
    ),
    Mutation(
        "GPU 18: what is converted is held whole",
        "model/load.py",
        "        made = group.to_own([found.whole() for found in stored])\n",
        "        made = group.to_own([found.whole() for found in stored])\n        "
        "SourceWeights.held = [*getattr("
        'SourceWeights, "held", []), made]  # type: ignore[attr-defined]\n',
        "distributed/test_layer_by_layer.py::test_a_rank_holds_no_more_than_one_layer_beside_its_shard",
    ),
    Mutation(
        "GPU fine print: attention dropout goes to a kernel without",
        ATTENTION,
        "scoring.dropout or ",
        "",
        f"{KERNEL}::test_what_the_kernel_lacks_runs_without_it",
    ),
    Mutation(
        "GPU fine print: seeds ask whether there is any card",
        "runtime/seeding.py",
        '        if self.device.type == "cuda":\n            state[',
        "        if torch.cuda.is_available():\n            state[",
        "unit/test_seeding.py::test_a_cpu_run_on_a_machine_with_cards_leaves_them_alone",
    ),
    Mutation(
        "GPU fine print: one rank divides its gradients by one",
        SHARDING,
        "    if world.size > 1:  # one rank divides",
        "    if True:  # one rank divides",
        f"{STEP}::test_one_rank_does_not_divide_its_gradients_by_one",
    ),
    Mutation(
        "GPU fine print: the head counts for all tokens",
        "model/flops.py",
        "self.per_loss_token * batch.num_loss_tokens",
        "self.per_loss_token * batch.num_tokens",
        f"{SPEED}::test_the_head_costs_what_is_supervised_and_an_embedding_nothing",
    ),
    Mutation(
        "GPU fine print: an A10G is taken for an A10",
        "train/throughput.py",
        "    fitting = [name for name in PEAK_TFLOPS if _words(name) <= words]\n",
        "    fitting = [name for name in reversed(PEAK_TFLOPS) if name in device_name][-1:]\n",
        f"{SPEED}::test_the_peak_of_a_device_is_its_own_and_that_of_an_unknown_one_is_not_guessed",
    ),
    Mutation(
        "GPU fine print: eight ranks take as little outside as one",
        "tools/plan/memory.py",
        "        nccl_gib = NCCL_GIB_PER_DOUBLING * math.log2(self.num_ranks_per_machine)\n",
        "        nccl_gib = 0.0\n",
        "unit/test_memory_plan.py::test_what_cuda_and_nccl_take_grows_with_the_ranks_of_a_machine",
    ),
    Mutation(
        "GPU fine print: a snapshot holds up the computation",
        SNAPSHOT,
        "nullcontext() if self._stream is None else torch.cuda.stream(self._stream)",
        "nullcontext()",
        f"{WHOLE}::test_no_copy_blocks_from_the_first_step_to_the_last_save",
    ),
    Mutation(
        "GPU fine print: an update does not wait for the snapshot",
        "train/step.py",
        "    run.checkpoints.before_update()\n",
        "",
        f"{WHOLE}::test_a_snapshot_follows_its_step_and_the_next_update_follows_the_snapshot",
    ),
    Mutation(
        "GPU fine print: a snapshot is copied before the step is computed",
        SNAPSHOT,
        "            self._stream.wait_stream(torch.cuda.current_stream(self._device))\n",
        "",
        f"{WHOLE}::test_a_snapshot_follows_its_step_and_the_next_update_follows_the_snapshot",
    ),
    Mutation(
        "GPU fine print: a thread writes before the copy is complete",
        MANAGER,
        "                buffers.wait_until_ready()\n",
        "                pass\n",
        f"{WHOLE}::test_every_thread_stands_on_its_own_card_and_no_copy_is_written_before_it_is_there",
    ),
    Mutation(
        "GPU fine print: the save that a run ends with fetches tensor by tensor",
        MANAGER,
        '(in_background or self.saver.device.type == "cuda")',
        "in_background",
        f"{WHOLE}::test_no_copy_blocks_from_the_first_step_to_the_last_save",
    ),
    Mutation(
        "GPU fine print: to count replicas a mesh is cut",
        WORLD,
        "        return self.size // self.num_shards\n",
        '        return self.mesh["ddp"].size() if "ddp" in (self.mesh.mesh_dim_names or ()) else '
        "1\n",
        "distributed/test_mesh.py::test_the_number_of_replicas_asks_no_mesh",
    ),
    Mutation(
        "GPU fine print: batches of workers lie in shared memory",
        "data/batch.py",
        "value.numpy() if isinstance(value, Tensor) else value",
        "value",
        "unit/test_loader.py::test_a_worker_needs_no_short_path_of_temporary_files",
    ),
    Mutation(
        "GPU fine print: every rank asks about the first card",
        "train/memory.py",
        """        f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}",\n""",
        """        "--id=0",\n""",
        "unit/test_meter.py::test_the_drivers_program_is_asked_about_the_rank_s_own_gpu",
    ),
    Mutation(
        "GPU fine print: any varlen_attn is called",
        "model/assemble.py",
        "        attention.require_kernel()\n",
        "        pass\n",
        f"{KERNEL}::test_a_kernel_with_another_signature_is_refused_before_anything_is_built",
    ),
)
