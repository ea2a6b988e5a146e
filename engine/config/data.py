"""The data section: which rows, in which format, how long, and which of their tokens are learned."""

from typing import Annotated, Literal

from engine.config.section import Advanced, Auto, Control, Expert, Ge, Gt, Le, Required, Section, Title, Unit, Words

Format = Literal[
    "messages", "sharegpt", "alpaca", "prompt_completion", "text", "preference", "ranking", "unpaired_preference",
    "stepwise_supervision", "distill", "embedding", "prompts", "tokens", "multimodal_pretrain", "synthetic",
]  # fmt: skip
_TURNS = ("tools", "system", "images")
PARTS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", *_TURNS),
    "sharegpt": ("conversations", *_TURNS),
    "alpaca": ("instruction", "output", "input", "history", *_TURNS),
    "prompt_completion": ("prompt", "completion", *_TURNS),
    "text": ("text", "images"),
    "preference": ("chosen", "rejected", "prompt", "input", *_TURNS),
    "ranking": ("prompt", "output", "input", "tools"),
    "unpaired_preference": ("label", "prompt", "completion", "messages", "input", "tools", "images"),
    "stepwise_supervision": ("prompt", "completions", "labels", "tools"),
    "distill": ("input_ids", "target_token_ids", "target_logprobs", "labels", "attention_mask"),
    "embedding": ("anchor", "positive", "negative", "score"),
    "prompts": ("prompt", "answer", "input", "tools", "images"),
    "tokens": ("input_ids", "labels", "attention_mask"),
    "multimodal_pretrain": ("text", "images", "input_ids", "labels", "attention_mask", "_mm_text"),
    "synthetic": (),
}
"""What a row of each format is made of: the keys of `columns`."""
RankingPairs = Literal["best_worst", "best_rest", "adjacent", "all"]
IN_MESSAGES = ("role", "content", "tool_calls", "thinking")
"""What a message is made of: the keys of `properties`."""
WITHOUT_MESSAGES = (
    "alpaca", "text", "stepwise_supervision", "distill", "embedding", "tokens", "multimodal_pretrain", "synthetic",
)  # fmt: skip
"""Formats in whose rows no message stands."""


class DataSource(Section):
    """One source of rows: a file, a folder or a data set, and how to read it."""

    path: Annotated[str, Control("path"), Required()] = ""
    """Where the rows are: a JSON, JSONL, CSV, Parquet or text file (also compressed), a folder, a hub data set, an address
    such as `s3://bucket/rows.jsonl`, `builtin/dates`, `builtin/shapes` with images, or `builtin/synthetic` for tokens drawn
    by chance."""

    format: Annotated[Format | None, Title("Format")] = None
    """What a row holds. Empty means that it is detected from the first rows, and the preview says what was seen."""

    columns: Annotated[dict[str, str], Advanced] = {}
    """Which column holds which part, as `part: column`, where the columns have names of their own: `prompt: question`."""

    properties: Annotated[dict[str, str], Expert] = {}
    """Which keys inside a message hold its parts, as `part: key`, such as `role: speaker` and `content: words`."""

    roles: Annotated[dict[str, str], Expert] = {}
    """What the rows' own names for roles mean, as `name: role`, such as `Customer: user` and `Agent: assistant`."""

    weight: Annotated[float, Gt(0), Le(1000), Advanced] = 1.0
    """How often the rows of this source are used in one epoch: 2 means twice, 0.5 a random half."""

    split: Annotated[str | None, Advanced] = None
    """Which split of a data set, such as `train`. Files have none."""

    subset: Annotated[str | None, Advanced] = None
    """Which subset of a data set on the hub, where it has several, such as `main`: its configuration, as `datasets` calls it."""

    revision: Annotated[str | None, Expert] = None
    """Which branch, tag or commit of a data set on the hub. Empty means its main branch. A run notes the commit and goes on with
    it; `refs/convert/parquet` is what the hub itself makes of many sets, which can be streamed."""

    chat_template: Annotated[str | None, Control("path"), Expert] = None
    """The chat template that this source's rows are written in, as `model.chat_template` names one. Empty means the model's."""

    ranking_pairs: Annotated[
        RankingPairs,
        Title("Pairs of a ranking"),
        Words(
            best_worst="the best against the worst",
            best_rest="the best against each other one",
            adjacent="each against the next one",
            all="each against all that are worse",
        ),
        Expert,
    ] = "best_worst"
    """Which pairs a list of answers, the best first, gives to methods that learn from pairs: one (`best_worst`), or several of
    each row, which then are rows of their own."""

    rows: Annotated[int | None, Ge(1), Le(1_000_000_000_000), Advanced, Unit("rows")] = None
    """Use only the first so many rows. Empty means all. Of synthetic rows, how many there are: 1,000 where it is empty."""

    tokens: Annotated[int | None, Ge(2), Le(1_048_576), Advanced, Title("Tokens a row"), Unit("tokens")] = None
    """How many tokens each synthetic row has, for benchmarks and tests. Empty means 512. Other rows have those they have."""

    min_tokens: Annotated[int | None, Ge(2), Le(1_048_576), Expert, Title("Shortest row"), Unit("tokens")] = None
    """How many tokens a synthetic row has at least, where lengths are drawn between this and `tokens`. Empty means that all
    rows have the same length."""


class Data(Section):
    """What the model learns from."""

    train: Annotated[list[DataSource], Title("Training data"), Control("sources"), Required()] = []
    """The rows to learn from. Several sources are mixed."""

    eval: Annotated[list[DataSource], Title("Held-out data"), Control("sources")] = []
    """Rows that are never trained on, to measure the loss on unseen data while training."""

    val_set_size: Annotated[float, Ge(0), Le(1_000_000_000), Title("Held-out part")] = 0.0
    """Hold rows of the training data out, to measure the loss on unseen data while training: below 1 a share of them,
    from 1 on a number of rows, 0 none. `run.seed` draws them, and rows with the same prompt stay on one side."""

    max_length: Annotated[int, Ge(8), Le(1_048_576), Title("Longest row"), Unit("tokens")] = 2048
    """The most tokens a row may have. Memory grows with it; what happens to longer rows is the next setting."""

    excess_length: Annotated[
        Literal["error", "drop", "truncate", "split"],
        Title("Rows that are too long"),
        Words(error="stop and say so", drop="leave them out", truncate="cut them", split="split them (plain text)"),
    ] = "error"
    """What happens to rows longer than `max_length`. Nothing is cut unless you say so here; the number of rows concerned
    is shown before launch."""

    truncation_side: Annotated[Literal["right", "left"], Title("Cut where"), Advanced] = "right"
    """Which end is cut when rows are truncated: `right` keeps the start, `left` keeps the end."""

    trained_turns: Annotated[
        Literal["assistant", "all", "last", "flag"],
        Title("Learned turns"),
        Words(
            assistant="every assistant turn",
            all="all turns, the user's too",
            last="the last assistant turn",
            flag="turns with `train: true`",
        ),
    ] = "assistant"
    """Which turns of a conversation are learned in SFT. The others are read but give no loss."""

    trained_thinking: Annotated[bool, Title("Learn the thinking"), Advanced] = True
    """Whether what the assistant thinks before an answer is learned too. Off, it is read, and what is learned of a turn
    begins with its answer: for rows whose reasoning is another model's, or a model that shall keep its own."""

    packing: Annotated[bool, Advanced] = False
    """Put several short rows into one sequence, so that no computation is spent on padding."""

    packing_cross_doc_attn_mask: Annotated[bool, Title("Keep packed rows apart"), Expert] = False
    """Make sure that no token attends to another row of its pack. Without it packed rows can see the ones before."""

    streaming: Annotated[bool, Advanced] = False
    """Prepare the training rows while training, a little ahead of it, instead of all of them first: for data that take too
    long to prepare or too much disk. Only a sample of them is counted before."""

    streaming_disk: Annotated[float, Gt(0), Le(100_000), Title("Disk for a stream"), Unit("GiB"), Expert] = 20.0
    """The most disk that the prepared rows of a stream take. Those that training has left behind make room for new ones."""

    ignore_data_skip: Annotated[bool, Title("Begin the epoch anew"), Expert] = False
    """Whether a resumed run begins the rows of its epoch anew, instead of going on behind the last one it was trained on."""

    dataset_prepared_path: Annotated[str | None, Title("Prepared data"), Control("path"), Expert] = None
    """Folder where tokenized rows are kept, so that the next run starts at once. Empty means the user's cache."""

    image_base_dir: Annotated[str | None, Title("Images below"), Control("path"), Advanced] = None
    """Folder that the paths of images in rows begin at; none may lead out of it. Empty means the folder of each source's
    file, and absolute paths are read as they are."""

    min_pixels: Annotated[int | None, Ge(1), Le(1_000_000_000), Title("Fewest pixels"), Unit("pixels"), Advanced] = None
    """Pixels that a smaller image is enlarged to, for processors that keep an image's shape, such as those of Qwen-VL and
    GLM-4V. Empty means the processor's own."""

    max_pixels: Annotated[int | None, Ge(1), Le(1_000_000_000), Title("Most pixels"), Unit("pixels"), Advanced] = None
    """Pixels that a larger image is made smaller to, for the same processors. Tokens and memory of an image grow with its
    pixels. Empty means the processor's own."""

    image_backend: Annotated[Literal["pil", "torchvision"] | Auto, Title("Images read by"), Expert] = "auto"
    """The library that resizes images. Both give the same sizes and slightly other pixels, so preview and training take
    one, and a resumed run goes on with its own. `auto` takes torchvision where it is installed, else Pillow (`pil`)."""

    dataloader_num_workers: Annotated[
        Annotated[int, Ge(0), Le(64)] | Auto, Title("Loader processes"), Unit("processes"), Advanced
    ] = "auto"
    """Processes that read images and make the next batches while a step is computed, for each training process. 0 leaves it
    to the training process, between steps; rows of text are there at once and need none. `auto` takes as many as keep a card
    fed by the images of a batch and the time that it is computed, within the cores and the memory that there are. Losses
    are the same with any number."""

    dataloader_prefetch_factor: Annotated[int, Ge(1), Le(64), Title("Batches ahead"), Unit("batches"), Expert] = 2
    """Batches that each loader process keeps ready. It bounds the memory that waiting batches take: so many times the
    processes, in shared memory (`/dev/shm`)."""

    image_cache_size: Annotated[int, Ge(0), Le(1_048_576), Title("Images kept"), Unit("MiB"), Expert] = 256
    """Memory for images as they were decoded last, in each process that reads them. One that comes again, in another row, in
    another pass over the same prompts or in the next epoch, is not decoded again while it is among them; a pixel takes 4 bytes.
    Loader processes begin anew with each epoch of prepared rows, and so do theirs. 0 keeps none. Losses are the same."""

    on_bad_row: Annotated[
        Literal["error", "skip"],
        Title("Bad rows"),
        Words(error="stop and name the row", skip="skip and count them"),
        Advanced,
    ] = "error"
    """What happens to a row that cannot be read or does not fit its format."""

    deduplicate: Annotated[
        Literal["exact"] | None,
        Title("Equal rows"),
        Words(exact="leave out all but the first"),
        Advanced,
    ] = None
    """Leave out rows that say exactly what an earlier one says (`exact`), in the training data and in the held-out data,
    each for itself. Empty takes all. A source's weight still repeats its rows."""

    shuffle: Annotated[bool, Advanced] = True
    """Mix the rows anew in each epoch. Off keeps the order of the file."""

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out rows: those of `eval`, or some of the training data."""
        return bool(self.eval) or self.val_set_size > 0
