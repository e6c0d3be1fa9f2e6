"""The training layer on top of the collectives. It imports no framework.

communicator      `gw.Communicator`: the calls that training code needs of a group
engine_group      runs gradwire's operations on a user's communicator
agreement_check   compares the names, shapes and settings of all ranks before they exchange tensors
finite            finds NaN and infinite values
fence             `Fence`: orders the writers of checkpoints
companions        plain values of gradwire's own objects that belong to a replicated state
loader_iterator   finds the DataLoader that iterates over a sampler, and counts its batches
sampling_progress  the progress of a run through the epochs of a sampler
sampler           `Sampler`: assigns samples to ranks
state             replicated state as a JSON description and a list of arrays
checkpoints       the files of checkpoints: writing, listing, reading and removing them
commit_rules      rules: when a step is committed, and which state survives a failure (no I/O, no clock)
bucket_writer     copies gradients into buckets
buckets           packs gradients into flat arrays
norms             the norm of replicated arrays, and clipping by it
compression       sends gradients in fewer bytes
zero              ZeRO-1: spreads the optimizer's state over the ranks
contract          checks that all replicas hold the same bits
transfer          copies the state of one rank to other ranks
weights           means weighted by the number of samples
bucket_reduction  averages one bucket over all ranks
backward          one backward pass: completed gradients, started reductions, and the final vote
step_requests     the requests of the step protocol, which all ranks perform together
checkpoint_protocol  protocol: when all ranks copy their state, when a checkpoint is complete (no I/O, no clock)
step_protocol     protocol: the vote after each step, and the agreement in a new generation (no I/O, no clock)
checkpoint_saver  copies a rank's share of the state, writes it in a thread, loads the newest checkpoint
replica           connects the step protocol to a group, a state and checkpoints
elastic           `gw.elastic`: training that survives lost ranks and admits new ones
gradients         `GradientSync`: reduces buckets while backward runs
"""

from __future__ import annotations

from gradwire.training.sampler import Sampler

__all__ = ["Sampler"]
