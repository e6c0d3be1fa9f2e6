"""A running generation: one numbered membership, with links between all ranks and one failure path.

elastic_membership   how a member gets to the next generation; None if the membership is fixed
failure_path         whether the generation is usable, how it breaks or ends, and which error to raise
waiting              how an operation waits: slow-wait warnings, its timeout, the error to raise
control_gather       exchanges small values between all ranks over control links, outside of any group
message_format       the description of a point-to-point message: dtype and shape
messages             point-to-point messages that have arrived, and the requests of the calls that receive them
mailbox              matches point-to-point messages with the calls that receive them
service_thread       the thread that serves control, point-to-point and heartbeat links
lifetime             closes what ends with a generation: groups, transport, memory, threads
connection           opens links with all other ranks
handshake            the agreement before the first call: tuning table, shared memory, heartbeats
generation           `Generation`: the objects that groups use
establish            `establish`: connects ranks and makes their generations
"""
