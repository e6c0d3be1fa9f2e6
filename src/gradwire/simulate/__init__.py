"""Whole jobs in virtual time, with faults, from one seed.

time.py          virtual time
process.py       processes that crash, freeze and thaw; their threads as programs
network.py       streams, calls and signs of life, with latency, loss and cuts
arithmetic.py    the training that is done, exact
collective.py    real schedules by the reference executor over simulated links
rank.py          a member's part in one generation: the real control, verdict and detector
worker.py        a member: registers, settles, trains, votes, breaks, recovers
launcher.py      speaks for the workers of a host
calls.py         calls to the coordinator
coordinator.py   the real membership behind them, with a journal
disk.py          what that journal is kept on: full, slow, without power
strangers.py     unfit newcomers, members of other runs, impostors
setting.py       what a job is like; faults.py: what happens to it
ledger.py        what must hold
world.py         all of it; `python -m gradwire.simulate` runs one after another
fixture.py       faults by seed for users' own tests
"""
