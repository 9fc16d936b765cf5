"""Parameters that some documents do not use: experts without tokens, a branch that depends on its
input.

Ranks sum the gradients of all parameters, so each rank must contribute a gradient for every
parameter, even if it is zero.
"""

from ranks import run_ranks
from sweeps import short_or_full
from test_invariance import train
from toy import relative
from toy_runs import source as source  # a fixture
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP


def conditional(world, source):
    """(losses, norms) where half of the documents pass by each feed-forward part; one document
    a micro-batch.
    """
    plain = Qwen2MLP.forward

    def forward(self, hidden):
        return plain(self, hidden) if hidden.sum() > 0 else hidden * 0.1

    Qwen2MLP.forward = forward
    losses, norms, *_ = train(world, source, 1)
    return losses, norms


def test_branches_that_documents_take_or_not_do_not_depend_on_ranks(source):
    losses, norms = run_ranks(conditional, 1, source)[0]
    usual = run_ranks(train, 1, source, 1)[0]
    assert relative(losses, usual[0]) > 1e-3, "the branches made no difference"
    for world_size, fsdp_size in short_or_full(((4, 2),), full=((2, -1), (4, 2), (3, 1))):
        found = run_ranks(conditional, world_size, source, fsdp_size=fsdp_size, timeout_s=60)[0]
        assert relative(found[0], losses) < 1e-6, (world_size, fsdp_size)
        assert relative(found[1], norms) < 1e-5, (world_size, fsdp_size)
