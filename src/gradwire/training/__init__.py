"""What a training loop needs around the collectives; no framework is imported here.

agreement_check   ranks compare what they must have in common before they exchange tensors by name
finite            finds values that are not finite
sampler           which samples a rank sees
fence             orders the writers of checkpoints
state             replicated state, taken apart into plain values and arrays
commit_rules      when a step is committed, and whose state survives a break; pure
bucket_writer     copies gradients into buckets
buckets           gradients side by side in one flat array
norms             the norm of replicated arrays, and clipping by it
compression       gradients in fewer bytes
zero              ZeRO-1: the optimizer's state spread over the ranks
contract          all replicas hold the same bits: checked
transfer          state on its way from one rank to others
weights           means weighted by the number of samples
bucket_reduction  the mean of one bucket over all ranks
backward          one backward: gradients that are ready, buckets that are reduced, the vote at its end
step_protocol     votes, and where to go on in a new generation; pure
elastic           `gw.elastic`: goes on when ranks are lost, and lets others join
gradients         `GradientSync`: buckets reduced while backward runs
"""

from __future__ import annotations

from gradwire.training.sampler import Sampler

__all__ = ["Sampler"]
