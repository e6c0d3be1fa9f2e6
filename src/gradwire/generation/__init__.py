"""A generation at work: one numbered membership, connected, with one failure path.

mailbox          matches point-to-point messages with the calls that receive them
service_thread   the thread that serves control, point-to-point and heartbeat links
waiting          how an operation waits: slow-wait warnings, its timeout, the error to raise
control_gather   all ranks exchange small values over control links, before and outside of any group
generation       `Generation`: connects, breaks and closes
handshake        what ranks agree on before the first call: tuning table, shared memory, heartbeats
"""
