"""The backend "gradwire" of torch.distributed: existing scripts run on our collectives by naming it.

Its parts:

    tensors         tensors as arrays, reduce ops as ours
    untraced        what torch.compile must not look into
    works           torch's handles of running collectives
    mail            send and recv, with such handles
    reductions      reducing collectives with all of torch's ops
    sparse          all-reduce of sparse tensors
    roll_call       the monitored barrier
    meeting         how the ranks of a process group find each other, through torch's store
    process_group   what torch calls

They are loaded when a process group is made: `gradwire_autoload` tells torch the name.
"""
