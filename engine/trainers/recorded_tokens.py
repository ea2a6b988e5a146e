"""Sampling with a static cache whose pass of one token is recorded as a CUDA graph and replayed for all tokens after it.

To sample a token a host launches some thousand kernels, each of which does next to nothing: 36 layers with adapters take a
host 60 ms where the card needs 5. With keys and values in transformers' StaticCache every token's pass is the same work at
the same addresses, so it is recorded once a sampling and replayed by one launch a token. `generate` stays transformers' own:
it asks the model for its compiled pass where the cache is static, and is given the recorded one. Nothing is kept between
samplings: the cache and the recording take no memory while the model learns, and adapters that moved are read where they lie. A
cache that is full is doubled, and the pass recorded anew.

The memory of a recording is the allocator's own pool, which another recording does not take over: once a recording is gone its pool
goes back to the card when the allocator is told to empty its cache, which is done every so many of them.

Numbers are those of the same kernels over a cache that is longer than its tokens, the rest masked: equal but for rounding.
What cannot be recorded (a kernel that asks the host) is computed as before, and the reason is kept.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from peft import PeftModel
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from engine.compat.cache_names import CACHE, cache_in
from engine.compat.instances import put
from engine.config.rollouts import Rollouts
from engine.config.tree import RunConfig, method_of
from engine.planning.memory_model import CACHE_TILE as TILE
from engine.trainers.shared_prompts import ATTENTION

FIRST = 256
"""Tokens that the cache has room for at first, in tiles of what attention kernels compute at once. A full one is doubled, so that
short answers do not wait for attention over the room of the longest."""
RELEASED = 32
"""Recordings whose memory, 25 to 45 MiB each, may be left to the allocator before it goes back to the card. In a long run they
would fill the card, and a recording that finds no room for its own is one that fails."""
HELD = ("none", "nf4", "fp8")
"""Values of `model.quantization` whose products ask nothing of the host."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def refused(config: RunConfig, model: PreTrainedModel, whole: bool) -> str:
    """Why this run's answers are not sampled with a static cache; empty where they are. `whole`: each rank holds all weights."""
    asked = method_of(config, Rollouts).cache_implementation
    if asked == "dynamic":
        return "method.cache_implementation is dynamic"
    if asked == "auto" and not torch.cuda.is_available():
        return "there is no GPU that would replay what is recorded"
    if not whole or config.memory.layer_offloading:
        return "the model's layers are not all on this device"
    own = model.config
    if own.get_text_config() is not own or not all(
        type(layer) is StaticLayer for layer in StaticCache(config=own, max_cache_len=1).layers
    ):
        return "the model's layers keep other things than keys and values of all tokens"
    if any(getattr(own, name, None) for name in EXPERTS):
        return "which experts compute a token is asked by the host"
    if own._attn_implementation not in ATTENTION:
        return f"the attention {own._attn_implementation} has no static cache"
    if config.model.quantization not in HELD:
        return f"model.quantization {config.model.quantization} asks the host in each product"
    return ""


class Recorder:
    """Of one device: the stream that passes are recorded on, so that what cuBLAS keeps for a stream is kept once, and how many
    recordings have left their memory to the allocator."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.left = 0

    def let_go(self) -> None:
        """One recording more is gone."""
        self.left += 1
        if self.left >= RELEASED:
            torch.cuda.empty_cache()
            self.left = 0


@functools.cache
def recorder_of(device: int) -> Recorder:
    """The one of a device, which is the current one."""
    return Recorder()


class Room:
    """The places of a static cache, of which `used` hold a token; at most `limit` will."""

    def __init__(self, cache: StaticCache, places: int, used: int, limit: int) -> None:
        self.cache, self.places, self.used, self.limit = cache, places, used, limit

    def count_token(self) -> bool:
        """Notes one more token; whether the cache lies elsewhere now, since it was full and more may come."""
        self.used += 1
        if self.used < self.places or self.places >= self.limit:
            return False
        self.places = min(2 * self.places, self.limit)
        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.max_cache_len = self.places
            layer.keys, layer.values = (_widened(each, self.places) for each in (layer.keys, layer.values))
        return True


def _widened(states: torch.Tensor, places: int) -> torch.Tensor:
    """Keys or values [B, H, L, D] in room for `places`."""
    wider = states.new_zeros((*states.shape[:2], places, states.shape[3]))
    wider[:, :, : states.shape[2]] = states
    return wider


class RecordedPass:
    """A forward pass that is computed the first time, recorded the second and replayed from then on.

    Called with the tensors of one token, (B, 1) ids and positions and a mask (B, 1, 1, L), and a StaticCache of L places.
    What it returns is overwritten by the next call. On a CPU, and where `reason` says why it could not be recorded, it is
    the plain pass.
    """

    def __init__(self, plain: Callable[..., Any], room: Room) -> None:
        self.plain, self.room = plain, room
        self.graph: torch.cuda.CUDAGraph | None = None
        self.reason = ""
        self.calls = self.replayed = 0
        self._fresh = True
        self._short = False
        self._inputs: list[torch.Tensor] = []
        self._outputs: Any = None

    def __call__(self, **inputs: Any) -> Any:
        self.calls += 1
        outputs = self._computed(inputs)
        if self.room.count_token():
            self.let_go()
            self._fresh = True
        return outputs

    def let_go(self) -> None:
        """Forgets what was recorded, if anything was."""
        if self.graph is not None:
            self.graph, self._inputs, self._outputs = None, [], None
            recorder_of(torch.cuda.current_device()).let_go()

    def _computed(self, inputs: dict[str, Any]) -> Any:
        tensors, fresh = _tensors(inputs), self._fresh
        self._fresh = False
        # The first pass over a new shape loads what it needs, which a recording may not.
        if fresh or self.reason or not tensors[0].is_cuda:
            return self.plain(**inputs)
        if self.graph is None and not self._record(inputs):
            return self.plain(**inputs)
        if [each.shape for each in tensors] != [each.shape for each in self._inputs]:
            return self.plain(**inputs)
        for kept, now in zip(self._inputs, tensors, strict=True):
            kept.copy_(now)
        assert self.graph is not None
        self.graph.replay()
        self.replayed += 1
        return self._outputs

    def _record(self, inputs: dict[str, Any]) -> bool:
        """Whether the pass is recorded now; nothing of it was computed yet."""
        own = {name: _cloned(value) for name, value in inputs.items()}
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        beside = recorder_of(here.device_index).stream
        chances = torch.cuda.default_generators[here.device_index]
        # A recording that fails leaves the generator's state as if it were still recorded: it draws nothing any more.
        spare = chances.clone_state()
        beside.wait_stream(here)
        try:
            with torch.cuda.stream(beside):
                # Other threads, such as one that saves, may go on with their own work.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    outputs = self.plain(**own)
                finally:
                    graph.capture_end()
        except RuntimeError as problem:
            chances.graphsafe_set_state(spare)
            if isinstance(problem, torch.OutOfMemoryError) and not self._short:
                # While it records the allocator takes nothing back by itself; the next token's pass is tried again.
                self._short = True
                torch.cuda.empty_cache()
                return False
            self.reason = f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"
            return False
        finally:
            here.wait_stream(beside)
        self.graph, self._inputs, self._outputs = graph, _tensors(own), outputs
        return True


@contextlib.contextmanager
def sampling_recorded(model: PreTrainedModel | PeftModel, base: Any, longest: int) -> Iterator[list[RecordedPass]]:
    """Inside, `model.generate` samples up to `longest` tokens with a static cache and a recorded pass, which is then in the
    list. `base` is the model that generates, below its adapters."""
    passes: list[RecordedPass] = []

    def generate(input_ids: torch.Tensor, **more: Any) -> Any:
        prompt = input_ids.shape[1]
        places, limit = (-(-(prompt + each) // TILE) * TILE for each in (min(longest, FIRST), longest))
        cache = StaticCache(config=base.config, max_cache_len=places)
        _take_over(cache, cache_in(more))
        passes.append(RecordedPass(base.__call__, Room(cache, places, prompt, limit)))
        return plain(input_ids=input_ids, **{**more, CACHE: cache})

    plain: Any = model.generate
    undos = [
        put(model, "generate", generate),
        put(base, "_valid_auto_compile_criteria", lambda *_: bool(passes)),
        put(base, "get_compiled_call", lambda *_: passes[-1]),
    ]
    try:
        yield passes
    finally:
        for undo in reversed(undos):
            undo()
        for each in passes:
            each.let_go()


def _take_over(cache: StaticCache, known: DynamicCache | None) -> None:
    """The keys and values that were computed already, layer by layer; those of `known` are let go."""
    layers: list[Any] = [] if known is None else list(known.layers)
    for place, layer in enumerate(layers):
        cache.update(layer.keys, layer.values, place)
        layer.keys = layer.values = None


def _tensors(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """What changes from token to token, masks by kind of layer too."""
    found: list[torch.Tensor] = []
    for value in inputs.values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            found += _tensors(value)
    return found


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {name: _cloned(each) for name, each in value.items()} if isinstance(value, Mapping) else value
