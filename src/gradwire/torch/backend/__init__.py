"""The backend "gradwire" of torch.distributed: existing scripts use gradwire's collectives by naming it.

    tensors             tensors as NumPy arrays, and torch's reduce ops as gradwire's
    no_dynamo           marks functions that torch.compile must not trace
    monitored_barrier   torch's monitored barrier
    store_rendezvous    connects the ranks of a process group through torch's store
    sparse              all-reduce of sparse tensors
    reductions          reducing collectives with all of torch's reduce ops
    work                torch's `Work` objects for collectives
    p2p                 send and recv, with their `Work` objects
    process_group       the process group that torch calls

These modules are imported when a process group is made. `gradwire_autoload` registers the backend's name with torch.
"""
