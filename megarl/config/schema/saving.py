"""Keys of every run that trains: when its state is saved, what is kept, from where it goes on."""

from dataclasses import dataclass

from megarl.config.schema.options import option


@dataclass(frozen=True, kw_only=True)
class SavingConfig:
    """Checkpoints, from which a run goes on as if it had never ended: <run folder>/checkpoints/step-<n>."""

    save_freq: int = option(
        "A checkpoint every so many steps: models, optimizers, schedules, random numbers, data positions; -1: not by steps.",
        -1,
        ge=-1,
    )
    save_minutes: float | None = option(
        "A checkpoint after the first step that ends so many minutes after the last one; null: not by time.",
        None,
        gt=0,
    )
    max_run_minutes: float | None = option(
        "The run may take so long, from its start: it saves and ends, with exit code 75, while there still is time for it, "
        "going by the longest step and the longest save so far; null: no limit.",
        None,
        gt=0,
    )
    save_hf: bool = option(
        "Each checkpoint also has the policy (with LoRA merged, and its adapters in PEFT's format) as a Hugging Face model, in its "
        "folder hf.",
        False,
    )
    async_save: bool = option(
        "Files of a checkpoint are written while the next steps run; it takes a copy of the states in the host's memory.",
        False,
    )
    on_save_error: str = option(
        "What a checkpoint does to the run that cannot be written (a full disk): stop it, or let it go on with a warning. Older "
        "ones stay as they were.",
        "stop",
        choices=("stop", "continue"),
    )
    max_ckpt_to_keep: int | None = option("The newest so many checkpoints are kept; null: all.", None, ge=1)
    keep_every: int | None = option(
        "Of steps that this number divides checkpoints are kept besides; null: none.", None, ge=1
    )
    best_metric: str | None = option(
        "A metric of validations (val/...): the checkpoint of the best value so far is saved when it is reached, and kept; null: "
        "none.",
        None,
    )
    best_mode: str = option(
        "Whether the best value of best_metric is the greatest or the least.", "max", choices=("max", "min")
    )
    checkpoint_url: str | None = option(
        "A folder that fsspec can open (s3://bucket/run): checkpoints are copied there while the run goes on, and taken from there "
        "where the run folder has none as new; null: none.",
        None,
    )
    resume_mode: str = option(
        "auto: go on from the newest good checkpoint of the run folder, if there is one; disable: begin anew; path: go on from "
        "resume_from_path. A run that begins anew moves the files of an earlier run in its folder to earlier_runs/<n>; one that goes on "
        "from an earlier step moves the checkpoints of later ones to checkpoints-<n>. Nothing is overwritten.",
        "auto",
        choices=("auto", "disable", "path"),
        refused={"resume_path": "write path"},
    )
    resume_from_path: str | None = option(
        "The checkpoint (a folder step-<n>) that resume_mode=path goes on from.", None, is_path=True
    )
    max_restarts: int = option(
        "A run that loses a process (it died, or hangs) is started again by itself, so often, from its newest checkpoint.",
        0,
        ge=0,
    )
