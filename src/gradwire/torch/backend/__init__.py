"""The backend "gradwire" of torch.distributed: existing scripts run on our collectives by naming it.

    tensors             tensors as arrays, torch's reduce ops as ours
    no_dynamo           functions that torch.compile must not look into
    monitored_barrier   torch's monitored barrier
    store_rendezvous    how the ranks of a process group find each other, through torch's store
    sparse              all-reduce of sparse tensors
    reductions          reducing collectives with all of torch's ops
    work                torch's handles of running collectives
    p2p                 send and recv, with such handles
    process_group       what torch calls

They are loaded when a process group is made: `gradwire_autoload` tells torch the name.
"""
