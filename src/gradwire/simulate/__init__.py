"""Whole jobs in virtual time, with faults, from one seed.

time                    virtual time: a queue of events
process                 processes that crash, freeze and thaw; their threads as programs
network                 streams, calls and heartbeats, with latency, loss and cuts
disk                    the coordinator's disk: full, slow, without power
toy_training            the training that is simulated, exact
invariants              what must hold in every job
worker_profile          what is special about a worker: a join token, a defect, another run
faults                  kinds of faults, drawn from the seed
scenario                what a job is like, drawn from the seed
coordinator_calls       calls to the coordinator, repeated until an answer comes
collective              real schedules by the reference executor over simulated links
simulated_coordinator   the real membership behind calls, with a journal
rank                    a member's part in one generation: the real control, verdict and detector
simulated_worker        a member: registers, trains, votes, breaks, recovers
simulated_launcher      sends heartbeats for the workers of a host, and starts others in their place
impostor                a process with a join token that claims to be others
simulated_job           all processes of a job, and the checks of what they report
fault_effects           what each kind of fault does to a job
world                   a whole job; `python -m gradwire.simulate` runs one after another
fixture                 a pytest fixture: faults by seed for users' own tests
"""
