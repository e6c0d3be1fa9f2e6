"""A generation at work: one numbered membership, connected, with one failure path.

elastic_membership   how a member gets to the next generation; None where membership is fixed
failure_path         whether the generation is sound, how it breaks or ends, and the error to raise
waiting              how an operation waits: slow-wait warnings, its timeout, the error to raise
control_gather       all ranks exchange small values over control links, before and outside of any group
mailbox              matches point-to-point messages with the calls that receive them
service_thread       the thread that serves control, point-to-point and heartbeat links
lifetime             what ends with a generation: groups, transport, memory, threads
connection           links with all other ranks: who dials, how long to wait
handshake            what ranks agree on before the first call: tuning table, shared memory, heartbeats
generation           `Generation`: what groups use, complete when it is made
establish            `establish`: connects ranks and makes their generations
"""
