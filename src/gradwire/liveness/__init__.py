"""Failure detection: who is alive, what each rank has called, and what broke a generation.

call_log           the last calls of a group on this rank: sequence numbers, fingerprints, places in the program
detector           heartbeat times in, suspects out; pure
verdict            what broke a generation, decided once and equally on all ranks; pure
heartbeat_messages      heartbeats on links, as frames or as one-time tokens of links admitted inside TLS
control_messages   what ranks send each other about the state of their generation: types and JSON
control_protocol   aborts, losses, goodbyes and disagreements reach all ranks: events in, instructions out; pure
control            its edge: bytes, links, threads that wait
lifeline           sends this rank's heartbeats and receives those of the others
"""
