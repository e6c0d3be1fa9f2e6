"""Whole jobs in virtual time, with faults, from one seed.

time                    virtual time: a queue of events
process                 processes that crash, freeze and thaw; their threads as programs
network                 streams, calls and heartbeats, with latency, loss and cuts
disk                    the coordinator's disk: full, slow, without power
toy_training            the training that is simulated, exact
invariants              what must hold in every job
coordinator_calls       calls to the coordinator, repeated until an answer comes
collective              real schedules by the reference executor over simulated links
strangers               unfit newcomers, members of other runs, impostors
simulated_coordinator   the real membership behind calls, with a journal
rank                    a member's part in one generation: the real control, verdict and detector
simulated_worker        a member: registers, trains, votes, breaks, recovers
simulated_launcher      sends heartbeats for the workers of a host, and starts others in their place
faults                  what happens to a job, drawn from the seed
scenario                what a job is like, drawn from the seed
world                   a whole job; `python -m gradwire.simulate` runs one after another
fixture                 a pytest fixture: faults by seed for users' own tests
"""
