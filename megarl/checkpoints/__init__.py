"""Checkpoints on the disk: folders `step-<n>` with any files and a manifest, each complete or not there at all.

Promises:

- a checkpoint is committed by one rename, after all its files and their folders are flushed; its manifest has the size and
  SHA-256 of each, so that a file truncated, altered or missing later is found, named and passed over;
- killed at any moment, a run finds the last good checkpoint or the new one, never neither; the newest good one is
  never removed;
- one process at a time writes to a folder, also on network file systems, and no lock is left behind by the dead;
- copies at a URL are written in the background, and fetched where the local ones are gone.

It does not know the files' contents, nor torch, Ray and Megatron.

Files: `manifest` flushes and hashes files, defines a checkpoint and finds damage, `store` builds, commits and finds checkpoints,
`policy` decides when to save and which checkpoints are kept, `writer_lock` keeps other writers out, `mirror` copies to a URL.
"""

from megarl.checkpoints.manifest import (
    Checkpoint,
    FileFacts,
    Manifest,
    Verify,
    changed_files,
    find_damage,
    read_checkpoint,
    seal_file,
    seal_files,
    steps_in,
)
from megarl.checkpoints.policy import Keep, SaveSchedule
from megarl.checkpoints.store import CheckpointStore

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "FileFacts",
    "Keep",
    "Manifest",
    "SaveSchedule",
    "Verify",
    "changed_files",
    "find_damage",
    "read_checkpoint",
    "seal_file",
    "seal_files",
    "steps_in",
]
