"""Failure detection: which ranks are alive, what each rank has called, and what broke a generation.

call_log             the latest calls of a group on this rank: sequence numbers, fingerprints, lines of the program
detector             decides from heartbeat times which ranks are lost; no I/O
verdict              decides what broke a generation, in the same way on all ranks; no I/O
heartbeat_messages   heartbeats on links: frames, or one-time tokens on links that were admitted inside TLS
control_messages     the messages between ranks about the state of their generation: types and JSON
control_protocol     spreads aborts, losses, goodbyes and mismatches to all ranks: events in, instructions out; no I/O
control              connects the control protocol with bytes, links and waiting threads
lifeline             sends this rank's heartbeats and receives those of the other ranks
"""
