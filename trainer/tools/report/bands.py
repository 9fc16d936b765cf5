"""Tables of the usual ranges of metrics, and of the shifts, growth and plateaus that indicate a problem.

`checks_bands.py` judges each row.
"""

from collections.abc import Iterator
from typing import NamedTuple

from trainer.tools.report.names import rows_of

_BANDS = """
# id                  | metric             | range     | level | profile    | reason | what is judged
loss_start_high       | loss 1-10          | ..5       | warn  | sft        | unfit | The first loss
loss_start_high       | loss 1-10          | 1.5..3    | note  | sft        | unfit | The first loss
loss_final            | loss last          | 0.1..     | warn  | sft        | by_heart | The last loss
loss_final            | loss last          | 0.5..1.5  | note  | sft        | none | The last loss
val_final             | val_loss last      | 0.8..2    | note  | sft        | none | The last validation loss
grad_high:sustained   | grad 10            | ..100     | warn  | sft        | unstable | The gradient norm
grad_range            | grad 50            | 0.1..10   | note  | sft        | scale | The gradient norm
grad_vanish           | grad 20            | 0.001..   | warn  |            | vanished | The gradient norm
data_bound            | data_share         | ..0.3     | fail  |            | slow_data | The share of data loading
data_bound            | data_share         | ..0.1     | warn  |            | slow_data | The share of data loading
time_high             | ordinary_time      | ..30      | warn  | sft        | slow | A step's time in seconds
time_high:while       | time_ratio 10      | ..2       | warn  |            | stalls | Step time relative to usual
time_high:stalls      | time_ratio 1       | ..5       | warn  |            | stalls | Step time relative to usual
time_high:while       | slowness 10        | ..2       | warn  |            | stalls | Usual tokens/s relative to now
time_high:stalls      | slowness 1         | ..5       | warn  |            | stalls | Usual tokens/s relative to now
gpu_util              | warm_gpu_util mean | 80..      | warn  |            | idle | The use of the devices in %
memory:headroom       | reserved_share 1   | ..0.95    | warn  |            | headroom | The share of memory in use
oom_nccl:memory       | ooms 1             | ..0       | fail  |            | too_little | The number of OOM errors
oom_nccl:retries      | alloc_retries 1    | ..0       | fail  |            | too_little | The number of alloc retries
truncation            | truncated mean     | ..0.05    | warn  |            | cut | The share of truncated samples
truncation:empty      | empty_label 1      | ..0       | warn  |            | empty | The number of empty samples
accuracy:zero         | accuracy 21        | 0.001..   | fail  | controller | no_answers | The accuracy
lr_schedule:zero      | zero_rate          | ..0.5     | warn  |            | no_rate | The share of rates that are 0
budget:stuck          | violation 21       | ..0.5     | fail  | controller | penalty | The share of answers over budget
budget:latency        | latency_ratio last | ..1       | warn  | controller | penalty | Latency relative to its budget
budget:final          | violation last     | ..0.05    | note  | controller | go_on | The last share over the budget
loss_oscillating      | swings             | ..0.5     | warn  | sft generic | swinging | The swing of the loss
loss_oscillating      | loss_size          | ..2       | warn  | controller | swinging | The size of the loss
loss_zero             | zero_loss 10       | ..0.5     | fail  | sft        | no_labels | The share of zero losses
loss_zero             | zero_loss 10       | ..0.5     | fail  | controller | no_groups | The share of zero losses
reward_trend:negative | reward max         | 0..       | info  | grpo controller | negative | The highest reward
course:reward         | reward 1-10        | -0.75..   | note  | controller | trend | The reward of epochs 1 to 10
course:reward         | reward 11-20       | -0.25..   | note  | controller | trend | The reward of epochs 11 to 20
course:reward         | reward 21-30       | 0.05..    | note  | controller | trend | The reward of epochs 21 to 30
course:accuracy       | accuracy 11-20     | 0.1..     | note  | controller | trend | The accuracy of epochs 11 to 20
course:accuracy       | accuracy 21-30     | 0.2..     | note  | controller | trend | The accuracy of epochs 21 to 30
course:budget         | violation 1-10     | ..0.6     | note  | controller | trend | Violations in epochs 1 to 10
course:budget         | violation 11-20    | ..0.4     | note  | controller | trend | Violations in epochs 11 to 20
course:budget         | violation 21-30    | ..0.3     | note  | controller | trend | Violations in epochs 21 to 30
kl                    | kl 1               | ..5       | note  |            | far | KL to the reference
kl                    | kl                 | 0.01..    | note  |            | still | KL to the reference
length_shift:shortest | min_length_ratio 1 | ..2       | note  |            | stops | Shortest length to usual
clipped_ratio         | clipped_ratio      | ..0.3     | fail  | grpo       | cut_off | The share of answers cut off
clipped_ratio         | clipped_ratio 1    | ..0.3     | fail  | grpo       | cut_off | The share of answers cut off
clipped_ratio:cap     | at_cap all mean    | ..0.2     | warn  | grpo       | no_end | The share of points at the cap
clipped_ratio:cap     | at_cap all mean    | ..0.002   | note  | grpo       | no_end | The share of points at the cap
saves_failed          | failed_saves 1     | ..0       | warn  |            | unsaved | Failed saves in a row
clip_ratio            | clip_ratio         | ..0.3     | warn  |            | unclipped | The share of clipped ratios
clip_ratio            | clip_ratio         | ..0.15    | warn  |            | unclipped | The share of clipped ratios
clip_ratio            | clip_ratio         | 0.1..0.3  | note  |            | unclipped | The share of clipped ratios
adv_shape:std         | equal_groups       | ..0.9     | warn  |            | equal | The share of equal groups
adv_shape:std         | adv_std            | 0.05..    | fail  |            | equal | The spread of advantages
adv_shape:std         | reward_std_ratio   | 0.05..    | fail  |            | equal | The relative spread of rewards
adv_shape:std         | adv_max            | 0.001..   | fail  |            | equal | The largest advantage
adv_shape:std         | adv_std            | 0.5..2    | warn  |            | one | The spread of advantages
adv_shape:mean        | adv_mean           | -0.1..0.1 | warn  |            | groups | The mean of advantages
reward_clip           | reward_clip        | ..0.4     | warn  |            | narrow | The share of clipped rewards
reward_clip           | reward_clip        | ..0.2     | note  |            | narrow | The share of clipped rewards
"""
"""Words after the metric: a number sets how many points form a level (default: a twentieth of the
log). `all` selects the whole log, `last` its end, and `1-10` the points from 1 to 10. A level is
the median of its points, unless `mean` or `max` is given.
"""

_MOVES = """
# id                  | metric             | by   | level | profile         | reason | what it means
reward_trend:collapse | reward passing     | -1   | warn  | grpo controller | diverges | the reward falls
reward_trend:scatter  | reward_std         | 2.4  | warn  | grpo            | scatter | rewards scatter
accuracy:collapse     | accuracy           | -1   | warn  | controller      | diverges | the accuracy falls
val_results:reward    | val_reward passing | -1   | warn  |                 | diverges | the held-out reward falls
val_results:accuracy  | val_accuracy       | -1   | warn  |                 | diverges | the held-out accuracy falls
budget:rising         | violation          | 1    | warn  | controller      | penalty | more answers miss the budget
budget:latency_rising | latency            | 1    | warn  | controller      | penalty | answers take longer and longer
loss_diverging:epochs | loss 11            | 1    | fail  | controller      | diverges | the loss rises: stop the run
grad_vanish           | grad               | -100 | warn  |                 | vanished | the gradient vanishes
entropy_collapse      | entropy            | -8   | warn  | grpo controller | explores | the policy stops exploring
entropy_rise          | entropy            | 2.2  | warn  | grpo controller | random | the policy's texts turn random
grad_high:rise        | grad passing       | 6    | warn  |                 | unstable | the gradient explodes
value_network:loss    | value_loss         | 10   | warn  |                 | values | the value network fails
value_network:error   | value_error        | 10   | warn  |                 | values | the value network fails
length_shift          | mean_length sudden passing | 1.4 | warn | grpo         | endless | answers grow
length_shift          | mean_length sudden passing | -1.4 | warn | grpo        | short | answers shrink
length_shift          | mean_length        | -2   | warn  | grpo            | short | answers shrink
time_growth:slowdown  | tokens_per_s 16    | -1.3 | warn  |                 | slower | training gets slower
time_growth:slowdown  | ordinary_time 16   | 1.3  | warn  |                 | slower | training gets slower
"""
"""The column `by` holds the factor of the move, negative for a fall; with 1, any move beyond the
noise counts. A number after the metric is the number of points that the move must have lasted.
`sudden` means that a slow move is not a fault; `passing` means that a move can be a fault even if
it reverses.
"""

_GROWTH = """
# id                  | metric             | by   | level | profile | reason | what it means
time_growth           | ordinary_time 20   | 0.1  | warn  |         | slower | Steps get slower
time_growth:start     | ordinary_time 8 start | 0.1 | note |        | slower | Steps get slower
memory:leak           | rss 500 late       | 0.03 | warn  |         | kept   | Host memory grows
memory:leak           | allocated 500 late | 0.03 | warn  |         | kept   | Device memory grows
memory:leak           | reserved 500 late  | 0.05 | warn  |         | kept   | Device memory grows
memory:leak           | rss 100 late       | 0.2  | warn  |         | kept   | Host memory grows
memory:leak           | allocated 100 late | 0.2  | warn  |         | kept   | Device memory grows
memory:leak           | reserved 100 late  | 0.2  | warn  |         | kept   | Device memory grows
memory:leak           | allocated 30 late  | 0.25 | warn  |         | kept   | Device memory grows
"""
"""The column `by` holds the share by which a metric must grow steadily. A number after the metric
is the smallest number of steps to judge. `start` selects only the first steps. `late` selects the
second half, because buffers and caches fill up in the first.
"""

_FLAT = """
# id                  | metric             | by   | level | profile         | reason | what does not rise
reward_trend:flat     | reward 8           |      | warn  | grpo controller | drowned | The reward
accuracy:flat         | accuracy 20        |      | warn  | controller      | unsuitable | The accuracy
"""
"""Results that never improve. The number after the metric is the smallest number of points to
judge.
"""


class Row(NamedTuple):
    """A row of one of the tables in this module."""

    id: str
    """Id of the finding. Of two findings with the same id, only the worse one is reported. If both
    are equally bad, the finding of the earlier row is reported: it finds the start of a lasting
    problem, while the later row finds short problems.
    """
    role: str
    options: frozenset[str]
    """The words after the metric."""
    range: str
    """The usual range, or the factor of a move."""
    level: str
    profiles: list[str]
    reason: str
    """A key of `REASONS` in advice.py, which gives the cause and the remedies."""
    what: str
    """The metric in words, or the meaning of its move."""

    @property
    def width(self) -> int:
        """Return the number among the options; 0 if there is none."""
        return next((int(word) for word in self.options if word.isdigit()), 0)


def _rows(table: str) -> Iterator[Row]:
    """Yield the rows of a table."""
    for id_, metric, range_, level, profiles, reason, what in rows_of(table):
        role, *options = metric.split()
        names = profiles.split()
        yield Row(id_, role, frozenset(options), range_, level, names, reason, what)


BANDS, MOVES, GROWTH, FLAT = (tuple(_rows(table)) for table in (_BANDS, _MOVES, _GROWTH, _FLAT))
