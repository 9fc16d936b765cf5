"""The arguments that FlashAttention 2, the kernel behind torch's `varlen_attn`, accepts. Its fake
form checks nothing.

Shape suffixes: N query heads, M key heads, T packed tokens, K head size, D documents.
"""

import torch


def insist(
    query_TNK,
    key_TMK,
    value_TMK,
    cu_seq_q_D1,
    cu_seq_k_D1,
    *,
    window,
    enable_gqa,
):
    query = query_TNK
    key = key_TMK
    value = value_TMK
    bounds = (cu_seq_q_D1, cu_seq_k_D1)
    assert query.dtype in (torch.bfloat16, torch.float16) and {key.dtype, value.dtype} == {
        query.dtype
    }
    assert {tensor.device for tensor in (key, value, *bounds)} == {query.device}
    assert query.ndim == 3 and query.shape[2] <= 256 and query.shape[2] % 8 == 0
    assert key.shape == value.shape == (len(query), key.shape[1], query.shape[2])
    assert query.shape[1] % key.shape[1] == 0 and (enable_gqa or query.shape[1] == key.shape[1])
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    assert all(cu.dtype == torch.int32 and cu.is_contiguous() and cu.ndim == 1 for cu in bounds)
    assert window[1] == 0 and window[0] >= -1
