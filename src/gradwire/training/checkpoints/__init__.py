"""The files of checkpoints. docs/checkpoints.md describes the format.

Every rank writes one part of a checkpoint. The manifest is written last and makes the checkpoint complete. This package
does not know how ranks agree on a step.

files         small files that are replaced as a whole, and the mapping of system errors
tensor_file   arrays in the format of safetensors: a writer with digests and a bounded reader
manifest      `Manifest`: the description of a checkpoint and its parts, as JSON
claims        `Claims`: the order in which runs have claimed a folder
checkpoint    `Checkpoint`: one checkpoint on the disk, complete or torn
background    runs one file operation at a time in a thread
folder        `CheckpointFolder` and `Draft`: writing, listing and removing checkpoints
compare       what differs between two checkpoints
export        writes a checkpoint as one plain file
"""

from __future__ import annotations

from gradwire.training.checkpoints.checkpoint import Checkpoint
from gradwire.training.checkpoints.folder import CheckpointFolder, Draft
from gradwire.training.checkpoints.manifest import Head, Manifest, Part, Shard, StoredArray
from gradwire.training.checkpoints.tensor_file import Cancelled

__all__ = [
    "Cancelled",
    "Checkpoint",
    "CheckpointFolder",
    "Draft",
    "Head",
    "Manifest",
    "Part",
    "Shard",
    "StoredArray",
]
