"""Methods that learn from rewards: the model answers, rules or models score the answers, better ones become likelier.

Prompts are the rows; the row's answer and its other columns go to the rewards. The settings that all of them share stand
in one base; the names are those of TRL's GRPOConfig where it has the setting.
"""

from typing import Annotated, ClassVar, Literal

from engine.config.kinds import LANGUAGE_FORMATS, REFERENCES, Kind, MethodSection, Rows
from engine.config.method_names import CALLED
from engine.config.section import Advanced, Auto, Control, Expert, Ge, Gt, Le, Lt, Required, Source, Title, Unit, Words

PROMPT_FORMATS = ("prompts", *(name for name in LANGUAGE_FORMATS if name not in ("tokens", "synthetic")))


class Rollouts(MethodSection):
    """What all methods with rewards share: the rewards, how answers are sampled, and the clipped policy loss."""

    formats: ClassVar[tuple[str, ...]] = PROMPT_FORMATS
    rows: ClassVar[Rows] = "prompts"
    lora_rate: ClassVar[float] = 1e-5
    full_rate: ClassVar[float] = 1e-6

    reward_funcs: Annotated[list[str], Title("Rewards"), Control("prompts"), Required()] = []
    """What scores an answer, one text each: `exact_match`, `gsm8k`, `regex:PATTERN`, `format:<think>{}</think>{}`,
    `length:TOKENS`, `json_schema:FILE`, a Python function as `rewards.py:score`, or a reward model as `model:NAME`. A
    weight may stand before it: `0.2 * length:64`."""

    reward_timeout: Annotated[float, Gt(0), Le(86_400), Title("Time for a reward"), Unit("seconds"), Advanced] = 60.0
    """How long one call of a reward function may take for a batch of answers. Past it the run ends and names it."""

    max_completion_length: Annotated[int, Ge(1), Le(1_048_576), Title("Longest answer"), Unit("tokens")] = 256
    """The most tokens of an answer. Longer ones are cut off; how many were is a curve. Prompts keep to
    `data.max_length`."""

    temperature: Annotated[float, Gt(0), Le(10), Advanced, Source("TRL: GRPOConfig.temperature")] = 1.0
    """How freely answers are sampled. Low values give like answers, from which little can be learned."""

    top_p: Annotated[float, Gt(0), Le(1), Expert, Source("TRL: GRPOConfig.top_p")] = 1.0
    """Sample only among the likeliest tokens that together have this probability."""

    top_k: Annotated[int, Ge(0), Le(1_000_000), Expert, Source("TRL: GRPOConfig.top_k")] = 0
    """Sample only among so many of the likeliest tokens. 0 means all."""

    repetition_penalty: Annotated[float, Gt(0), Le(10), Expert, Source("TRL: GRPOConfig.repetition_penalty")] = 1.0
    """Above 1 tokens that were used already become less likely."""

    cache_implementation: Annotated[
        Literal["static", "dynamic"] | Auto,
        Title("Keys and values of answers"),
        Words(static="in room for the longest answer, a token's pass recorded", dynamic="in room that grows"),
        Expert,
        Source("TRL: GRPOConfig.cache_implementation"),
    ] = "auto"
    """Where keys and values lie while answers are sampled. `static` has room for the longest answer from the start, so that
    on a GPU the pass of one token is recorded as a CUDA graph and replayed, which spares the host most of sampling. `auto`
    takes it on a GPU where the model's layers allow it."""

    num_iterations: Annotated[int, Ge(1), Le(100), Title("Uses of an answer"), Advanced] = 1
    """How often each answer is trained on before new ones are sampled."""

    steps_per_generation: Annotated[int | None, Ge(1), Le(10_000), Title("Batches sampled together"), Advanced] = None
    """How many batches of answers are sampled at once. Empty means those of one optimizer step, so that every answer is
    the present model's own; more sample faster and learn from slightly older answers."""

    epsilon: Annotated[float, Gt(0), Lt(1), Title("Clipping"), Advanced, Source("arXiv:1707.06347")] = 0.2
    """How far the probability of a token may move from the one it was sampled with before it teaches no more."""

    epsilon_high: Annotated[
        float | None, Gt(0), Le(10), Title("Clipping above"), Expert, Source("arXiv:2503.14476")
    ] = None
    """The same bound upward. Empty means the same as downward; 0.28 lets unlikely tokens grow."""

    beta: Annotated[float, Ge(0), Le(100), Title("Hold to the reference"), Source("arXiv:2402.03300")] = 0.0
    """How strongly the model is held to where it started, by the KL divergence (weighed as in
    arXiv:2512.02556). 0 needs no reference at all."""

    reference: Annotated[
        Literal["adapter_off", "adapter_copy", "copy"] | Auto,
        Title("Reference"),
        REFERENCES,
    ] = "auto"
    """Where the reference log-probabilities come from when `beta` is above 0. `auto` switches the adapter off when there
    is one, which costs no memory, or keeps it as it began where training goes on from it, and otherwise keeps a frozen copy of
    the model."""

    rollout_groups: Annotated[int, Ge(0), Le(256), Title("Groups kept to look at"), Advanced] = 4
    """How many prompts of each sampling are kept in the run folder with all their answers, rewards and advantages."""


class Groups(Rollouts):
    """What methods share that compare the answers of a group with each other."""

    num_generations: Annotated[int, Ge(1), Le(1024), Title("Answers a prompt"), Source("arXiv:2402.03300")] = 8
    """How many answers are sampled for each prompt and compared with each other."""

    loss_type: Annotated[
        Literal["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo"],
        Title("Loss"),
        Words(
            grpo="mean over answers of their mean over tokens",
            dapo="mean over all tokens of the step",
            dr_grpo="sum over tokens by the longest length",
            bnpo="mean over the tokens of a batch",
            cispo="clipped weights, no token falls out",
            sapo="soft gate in place of the clip",
        ),
        Advanced,
        Source("TRL: GRPOConfig.loss_type"),
    ] = "dapo"
    """How the tokens' losses become one number, and what clips them. `dapo` weighs every token alike (arXiv:2503.14476),
    `grpo` every answer alike (arXiv:2402.03300), `dr_grpo` takes out the bias to length (arXiv:2503.20783)."""

    importance_sampling_level: Annotated[
        Literal["token", "sequence"], Expert, Source("arXiv:2507.18071"), Title("Ratio taken")
    ] = "token"
    """Whether the ratio of new to old probability is taken for each token or for the whole answer (GSPO)."""

    mask_truncated_completions: Annotated[
        bool, Title("Leave out cut answers"), Advanced, Source("arXiv:2503.14476")
    ] = False
    """Do not learn from answers that were cut off at the longest length."""

    skip_zero_advantage: Annotated[
        bool | Auto, Title("Leave out answers that teach nothing"), Advanced, Source("arXiv:2503.14476")
    ] = "auto"
    """Leave answers with an advantage of 0 out of the passes of the loss: a group whose answers all get the same reward has a
    gradient of zero, and is computed forward and backward to no end. The gradient stays the same. `auto` leaves them out
    unless each answer is held to the reference (`beta`), experts are balanced over all tokens, or layers are compiled. The
    curve of the entropy is then that of the computed answers; `false` computes all, and its entropy is that of all."""

    reroll_start_fraction: Annotated[
        float, Ge(0), Le(1), Title("Failed prompts come back after"), Unit("share of the steps"), Expert
    ] = 1.0
    """After which share of the steps prompts come back on which every answer failed: all rewards alike, and none above 0. Each
    takes the place of another prompt in a sampling, oldest first, when the model may know more. 1 means never."""

    reroll_max_groups: Annotated[int, Ge(1), Le(1024), Title("Failed prompts a sampling"), Expert] = 1
    """How many prompts of a sampling are ones that failed before, at most. More teach more of what is hard, and less of the
    rest."""

    reroll_max_tries: Annotated[int, Ge(1), Le(1_000_000), Title("Times a failed prompt comes back"), Expert] = 4
    """How often a prompt comes back on which every answer fails, before it is given up: one with a wrong reference answer
    fails for ever. One that is paid for an answer is counted anew."""

    replay_buffer_size: Annotated[int, Ge(0), Le(65_536), Title("Replay buffer"), Unit("groups"), Advanced] = 0
    """How many groups that taught something are kept, in main memory, to take the place of groups that teach nothing: all
    rewards alike, or all answers left out. Those with the highest scores are kept, and drawn by score: mean size of the
    advantages times spread of the rewards. At most so many groups of a sampling are replayed. 0 means none."""

    replay_max_age: Annotated[int, Ge(1), Le(1_000_000), Title("Oldest replay"), Unit("steps"), Expert] = 10
    """After how many steps a group in the replay buffer is dropped. The older it is the further the model has moved from the
    one that gave it, and the oftener it was trained on: few groups that come again for long are learned by heart."""

    replay_recompute_logps: Annotated[
        bool, Title("Clip around the present model"), Expert, Source("arXiv:2110.00641")
    ] = True
    """Whether a replayed token's old log-probability is computed anew, by the model as it is when its group is replayed. Each
    replay may move it then as far as the clip allows, and it counts by how much likelier it is now than it was to the model
    that gave it. `false` takes the ratio to the model that gave it, so the clip bounds what all its replays do together."""

    replay_max_weight: Annotated[float, Ge(1), Le(100), Title("Heaviest replayed token"), Expert] = 2.0
    """The most that a replayed token counts where its old log-probability is computed anew; a new one counts 1."""
    off_policy_mask_threshold: Annotated[
        float | None, Gt(0), Le(100), Title("Leave out answers too far off"), Expert, Source("arXiv:2512.02556")
    ] = None
    """Do not learn from a bad answer (advantage below 0) that the model has moved away from: one whose mean divergence of a token
    from when it was sampled is above this. Such answers push hardest where the model no longer is. Empty keeps all; 0.5 is usual."""

    async_prefetch: Annotated[
        Literal["none", "rewards", "answers"],
        Title("Made while training"),
        Words(
            none="nothing: answers, rewards, then a step",
            rewards="rewards of the answers to come",
            answers="answers and rewards, by a process of its own",
        ),
        Advanced,
        Source("Axolotl: async_prefetch"),
    ] = "none"
    """What is made for the next batches while the model trains on this one. `rewards` samples a batch ahead, and its reward functions
    compute meanwhile: for rewards that take long. `answers` has a process of its own sample too, beside the training, which is given
    the adapter as a file. Answers are then some steps old, which `importance_sampling_mode` corrects. Which weights answer what
    follows from the step alone, so a run is the same however fast its processes are."""

    prefetch_depth: Annotated[
        int, Ge(1), Le(16), Title("Samplings ahead"), Expert, Source("Axolotl: prefetch_depth")
    ] = 1
    """How many samplings are asked for ahead of the one that is trained on. More bridge times in which answers or rewards take
    long, and each makes answers older by one sampling."""

    weight_sync_steps: Annotated[
        int,
        Ge(1),
        Le(1000),
        Title("Adapter sent every"),
        Unit("steps"),
        Expert,
        Source("TRL: AsyncGRPOConfig.weight_sync_steps"),
    ] = 1
    """After how many steps the generating process is given the adapter anew. More save the writing of a file, and make answers
    older."""

    generation_timeout: Annotated[float, Gt(0), Le(86_400), Title("Time for a sampling"), Unit("seconds"), Expert] = (
        1800.0
    )
    """How long the generating process may take for one sampling. Past it, as where it ends by itself, it is started anew and asked
    again, once; then the run ends. It has as long to load the model, and at least half an hour."""

    generation_device: Annotated[int | None, Ge(0), Le(1023), Title("GPU that samples"), Expert] = None
    """The GPU that the generating process works on, by its number as in `run.devices`. Empty shares the training's own, which then
    holds the model twice; on a CPU both processes share the cores."""

    importance_sampling_mode: Annotated[
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
        Title("Old answers are weighed"),
        Words(
            token_truncate="each token, at most the bound",
            token_mask="each token, none above the bound",
            sequence_truncate="each answer, at most the bound",
            sequence_mask="each answer, none above the bound",
        ),
        Expert,
        Source("TRL: GRPOConfig.vllm_importance_sampling_mode"),
    ] = "sequence_mask"
    """How answers that were sampled by older weights are weighed: by how much likelier the model finds them now, token by token or
    as whole answers. What is above `importance_sampling_cap` counts as the bound (`truncate`) or not at all (`mask`)."""

    importance_sampling_cap: Annotated[
        float,
        Gt(0),
        Le(1000),
        Title("Bound of that weight"),
        Expert,
        Source("TRL: GRPOConfig.vllm_importance_sampling_clip_max"),
    ] = 3.0
    """The largest weight of a token or an answer that older weights sampled."""


class Grpo(Groups):
    """Group relative policy optimization: several answers to each prompt are scored, and those better than their group's
    mean become likelier. Needs prompts and something that scores answers: a rule, a Python function or a reward model.
    Start from a model that sometimes gets it right: a group without any difference teaches nothing."""

    kind: Annotated[Literal["grpo"], Kind] = "grpo"
    called: ClassVar[str] = CALLED["grpo"]
    description: ClassVar[str] = "GRPO: learn from rewards, answers compared in groups"

    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        Title("Scale by spread of"),
        Words(group="each group", batch="the whole batch", none="nothing"),
        Advanced,
        Source("TRL: GRPOConfig.scale_rewards"),
    ] = "group"
    """By which spread a reward's distance from its group's mean is divided."""


class Gdpo(Groups):
    """Group reward-decoupled normalization: as GRPO, but each reward is compared within its group by itself before they
    are added up. Needs prompts and two or more rewards. Take it where a large reward would drown a small one: in the sum
    of GRPO different rewards that come to the same total teach nothing."""

    kind: Annotated[Literal["gdpo"], Kind] = "gdpo"
    called: ClassVar[str] = CALLED["gdpo"]
    description: ClassVar[str] = "GDPO: as GRPO, each of several rewards by itself"


class Ppo(Rollouts):
    """Proximal policy optimization: a value head learns what an answer will be worth, and tokens that turn out better than
    it thought become likelier. Needs prompts and something that scores answers, one answer a prompt. More to tune than
    GRPO; take it where one answer a prompt is all you can afford, or where credit for single tokens matters."""

    kind: Annotated[Literal["ppo"], Kind] = "ppo"
    called: ClassVar[str] = CALLED["ppo"]
    description: ClassVar[str] = "PPO: learn from rewards, with a value head"

    num_generations: Annotated[int, Ge(1), Le(1024), Title("Answers a prompt"), Advanced] = 1
    """How many answers are sampled for each prompt. The value head judges each by itself; several share the cost of
    their prompt."""

    num_iterations: Annotated[int, Ge(1), Le(100), Title("Uses of an answer"), Advanced] = 4
    """How often each answer is trained on before new ones are sampled."""

    beta: Annotated[float, Ge(0), Le(100), Title("Hold to the reference"), Source("arXiv:2203.02155")] = 0.05
    """How much of the divergence from the reference is taken off the reward, token by token. 0 needs no reference at
    all."""

    gamma: Annotated[float, Gt(0), Le(1), Title("Discount"), Expert, Source("arXiv:1506.02438")] = 1.0
    """What a reward counts for the token before it. 1 gives every token of an answer the whole of it."""

    lam: Annotated[float, Ge(0), Le(1), Title("GAE lambda"), Advanced, Source("arXiv:1506.02438")] = 0.95
    """How far ahead an advantage looks before it trusts the value head: 1 waits for the reward itself, 0 trusts at once."""

    vf_coef: Annotated[float, Gt(0), Le(100), Title("Weight of the value loss"), Advanced] = 0.1
    """What the loss of the value head counts beside that of the answers."""

    cliprange_value: Annotated[
        float, Gt(0), Le(100), Title("Clipping of values"), Expert, Source("TRL: PPOConfig.cliprange_value")
    ] = 0.2
    """How far a value may move from the one it had when the answer was sampled before it learns no more."""

    value_learning_rate: Annotated[float, Gt(0), Le(1), Title("Rate of the value head"), Advanced] = 1e-3
    """The learning rate of the value head, which begins at 0 and must learn faster than the model. The schedule is the
    model's."""
