"""Simulate whole jobs in virtual time, with faults drawn from a seed; provide a pytest fixture that injects faults.

The protocols are the shipped code. Links, calls, clocks, disks and processes are simulated.

time                    virtual time: a queue of events, and clocks
process                 processes that crash, freeze and resume; their threads are generators
network                 streams, calls and heartbeats, with latency, loss and cuts
disk                    the disk of the coordinator's journal: full, slow, after a power loss
toy_training            the simulated training, with exact arithmetic
invariants              the rules that every job must keep
worker_profile          the special properties of a worker: a join token, a defect, another run
faults                  the kinds of faults, and how they are drawn from the seed
scenario                the size, timings and faults of a job, drawn from the seed
coordinator_calls       calls to the coordinator, repeated until an answer comes
collective              real schedules, run by the reference executor over simulated links
simulated_coordinator   the real membership and its rules for calls, with a journal
rank                    a member in one generation, with the real control protocol, verdict and detector
simulated_checkpoints   the checkpoints of members: a shared folder, and threads that write
simulated_worker        a member: it registers, trains, votes, breaks and recovers
simulated_launcher      sends heartbeats for the workers of a host, and replaces workers that end
impostor                a process with a join token that claims the ids of other members
simulated_job           all processes of a job, and checks of what they report
fault_effects           applies each kind of fault to a job
world                   a whole job with its faults; `python -m gradwire.simulate` runs many of them
fixture                 the pytest fixture `gradwire_ranks`, which injects faults into users' own tests
"""
