"""The run section: where it runs, what it writes and how often."""

from typing import Annotated, Literal

from engine.config.section import Advanced, Auto, Control, Expert, Ge, Le, Section, Source, Title, Unit, Unsupported

TRACKERS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "comet": "comet_ml",
}
"""Each with the name of transformers' callback, which is that of the package that it needs."""


class Run(Section):
    """Where the run goes and what it leaves behind."""

    backend: Annotated[Literal["torch", "mlx", "unsloth"], Unsupported("mlx", "unsloth"), Expert] = "torch"
    """Which engine trains. This version has `torch` alone."""

    devices: Annotated[
        Annotated[int, Ge(1), Le(1024)] | list[Annotated[int, Ge(0), Le(1023)]] | Auto, Control("list"), Advanced
    ] = "auto"
    """Which GPUs: `auto` takes one free GPU, a number takes so many, a list such as `[0, 2]` takes those. Without a GPU a
    number is so many processes on the CPU, at most one for each core; each takes batches of its own, as a GPU does."""

    output_dir: Annotated[str, Title("Runs folder"), Control("path"), Advanced] = "runs"
    """Folder that holds the run folders. A relative path starts at the config file."""

    name: Annotated[str | None, Title("Name of the run")] = None
    """A name for the run; a number is added. Empty means the file's name."""

    seed: Annotated[int, Ge(0), Le(4_294_967_295), Advanced] = 42
    """Where randomness starts. The same seed, data and machine give the same run."""

    full_determinism: Annotated[
        bool, Title("Same numbers every time"), Expert, Source("transformers: full_determinism")
    ] = False
    """Take only operations that add up in one order, so that two runs with one seed on one machine have the same losses to
    the last digit, on a GPU too. Slower. Nothing is chosen by timing then. A model that needs an operation without such a
    form ends with that operation's name."""

    logging_steps: Annotated[int, Ge(1), Le(1_000_000), Title("Log every"), Unit("steps"), Advanced] = 1
    """Write the loss every so many steps."""

    save_steps: Annotated[int, Ge(1), Le(1_000_000_000), Title("Checkpoint every"), Unit("steps")] = 200
    """Keep a checkpoint every so many steps, from which the run can go on. The end of the run always gives one."""

    saves_per_epoch: Annotated[int | None, Ge(1), Le(100_000), Title("Checkpoints per epoch"), Advanced] = None
    """Keep a checkpoint so many times in each epoch, evenly, in the place of `save_steps`."""

    save_total_limit: Annotated[int, Ge(2), Le(10_000), Title("Checkpoints kept"), Advanced] = 2
    """How many checkpoints are kept; older ones are deleted once a newer one is whole. At least 2, so that there is
    always a whole one."""

    on_nan: Annotated[Literal["stop", "skip", "go_on"], Title("When numbers break"), Advanced] = "stop"
    """What to do when the loss or the gradient norm of a step is not finite (NaN or infinite). `stop` ends the run as failed
    and names the step; `skip` leaves the optimizer's step out and goes on with the next batch, and waits for the device at
    each step to know; `go_on` trains on. A checkpoint whose weights are not finite is never saved, and none is deleted for
    it. A step that the gradient scaler of float16 leaves out is none of these."""

    max_skipped_steps: Annotated[int, Ge(1), Le(1_000_000), Title("Skipped in a row"), Unit("steps"), Expert] = 10
    """How many steps in a row `run.on_nan: skip` leaves out; one more ends the run as failed."""

    eval_steps: Annotated[
        Annotated[int, Ge(1), Le(1_000_000_000)] | Auto, Title("Evaluate every"), Unit("steps"), Advanced
    ] = "auto"
    """Measure the loss on the held-out data every so many steps. `auto` does it ten times a run."""

    metric_for_best_model: Annotated[
        str | None, Title("Best by"), Advanced, Source("transformers: metric_for_best_model")
    ] = None
    """Which number of the held-out rows tells the best checkpoint, by its name in the curves. Empty means the loss, and the
    reward where sampled answers are rewarded."""

    greater_is_better: Annotated[
        bool | None, Title("More is better"), Expert, Source("transformers: greater_is_better")
    ] = None
    """Whether more of that number is better. Empty means no for a loss and yes for all others."""

    save_best: Annotated[bool, Title("Save the best"), Advanced] = True
    """Keep a checkpoint whenever held-out rows are measured better than before. Off marks the best of those that are kept
    anyway. The best one is never deleted for newer ones."""

    evals_per_epoch: Annotated[int | None, Ge(1), Le(100_000), Title("Evaluations per epoch"), Advanced] = None
    """Measure the loss on the held-out data so many times in each epoch, evenly, in the place of `eval_steps`."""

    prompts: Annotated[list[str], Control("prompts"), Title("Sample prompts")] = []
    """Prompts that the model answers again and again while it trains, so that you see it change."""

    prompts_steps: Annotated[
        Annotated[int, Ge(1), Le(1_000_000_000)] | Auto, Title("Sample every"), Unit("steps"), Advanced
    ] = "auto"
    """Answer the sample prompts every so many steps. `auto` does it ten times a run."""

    max_new_tokens: Annotated[int, Ge(1), Le(65_536), Title("Longest sample"), Unit("tokens"), Advanced] = 64
    """The most tokens of one sample answer."""

    report_to: Annotated[
        list[str], Control("list"), Title("Trackers"), Advanced, Source("transformers: report_to")
    ] = []
    """Give the curves to these trackers, too: `tensorboard`, `wandb` (Weights & Biases), `mlflow`, `trackio`, `comet`. What
    they write lies in the run's folder under `trackers`; `wandb` and `comet` send it on where they are logged in, else it
    waits there for `wandb sync` or `comet upload`, and `mlflow` goes to the server that MLFLOW_TRACKING_URI names. A
    tracker sees the numbers, the trainer's arguments and the model's config (Comet the list of its modules too), no rows.
    Its own variables count: WANDB_PROJECT, TENSORBOARD_LOGGING_DIR, MLFLOW_EXPERIMENT_NAME, TRACKIO_DIR,
    COMET_PROJECT_NAME."""

    push_to_hub: Annotated[bool, Title("Push to a hub"), Advanced, Source("transformers: push_to_hub")] = False
    """Send checkpoints to a hub while it trains, in a process beside it that no step waits for: the adapter or the weights, the
    tokenizer and a model card, of a checkpoint that is complete. That the repository takes what this machine's token writes
    (`hf auth login` or HF_TOKEN) is looked at before the first step. A network that fails is said and tried again."""

    hub_model_id: Annotated[str | None, Title("Repository"), Advanced, Source("transformers: hub_model_id")] = None
    """The repository on the hub, as `owner/name`. It is made where there is none."""

    hub_strategy: Annotated[
        Literal["end", "every_save", "checkpoint", "all_checkpoints"],
        Title("What is pushed"),
        Advanced,
        Source("transformers: hub_strategy"),
    ] = "every_save"
    """`end` sends the last checkpoint's model once the run finishes; `every_save` that of each checkpoint, a newer one in the
    place of one that still waits; `checkpoint` also all of the newest, with its optimizer states, in the folder
    `last-checkpoint`; `all_checkpoints` all of each in a folder of its own. All of one has, of a run on rewards, prompts and
    answers of its rows in it."""

    hub_private_repo: Annotated[
        bool, Title("Private repository"), Advanced, Source("transformers: hub_private_repo")
    ] = True
    """A repository that is made is private, and one that everybody can read is refused. Off makes it public; one that is
    private stays so."""

    hub_wait_seconds: Annotated[int, Ge(0), Le(86_400), Title("Wait for the last push"), Unit("seconds"), Expert] = 1800
    """How long a run that has made its steps waits at most for its last checkpoint to arrive, and less where no byte goes any
    more. A request to stop ends that. What has not arrived is said, with the command that sends it."""

    notify: Annotated[str | None, Title("Notify"), Advanced] = None
    """Post a short message to this address when the run ends, fails, diverges, stalls, or the disk has no room
    for its next checkpoint: an ntfy topic, such as `https://ntfy.sh/a-name-of-yours`, gets text; any other webhook (Slack,
    Mattermost, Discord, your own) gets JSON. It names the run, its state, the cause in a word, the step and the last losses
    or rewards, no rows. It has 15 seconds, and a failure is a line in the log. The address stands in the config alone; where it is shown, only its host is."""

    max_restarts: Annotated[int, Ge(0), Le(1000), Title("Restarts"), Advanced] = 0
    """How often a run whose process died goes on by itself from its newest whole checkpoint: one that was killed, a lost
    rank, a card or a network between cards that failed. A new checkpoint lets the count begin anew. Numbers that diverged,
    rows that are refused, too little memory and a full disk would come again, so they end the run."""

    grace_seconds: Annotated[int, Ge(1), Le(86_400), Title("Time to stop"), Unit("seconds"), Expert] = 60
    """How long a run that was asked to stop may go without an answer before it is ended. A checkpoint that is being written
    then is waited for, unless nothing of it changes for ten minutes, and so is the step that is to be saved, for half an hour
    while it computes. `workbench train` that gets SIGTERM, or Ctrl-C without a terminal, waits no longer than this for a step, nor
    does a job of SLURM whose time ends."""
