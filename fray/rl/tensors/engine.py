"""Inference engine: generates the completions of many requests together, one token of each in a step. Without threads.

A request that comes while others are under way joins them in the next step (continuous batching); what it is answered
does not depend on them.
"""

from __future__ import annotations

import inspect
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from fray.rl.core.versions import Segment, VersionName
from fray.rl.inference.requests import Completion, FinishReason, GenerateRequest, PromptTooLong, TokenEvent
from fray.rl.tensors import flat_weights
from fray.rl.tensors.adapters import AdapterSet
from fray.rl.tensors.language_model import LanguageModel
from fray.rl.tensors.sampling import RowSampling, choose, stream_key, tensor_of
from fray.rl.tensors.slot_cache import SlotCache
from fray.rl.weights_table import WeightTable

Answer: TypeAlias = TokenEvent | tuple[str, Completion]
"""A token of a stream, or a request's id and one of its completions."""

ROW = np.dtype(
    [
        *(
            (name, np.int64)
            for name in ("position", "count", "max_tokens", "min_tokens", "last", "top_k", "top_logprobs")
        ),
        *(("key", np.uint64), ("temperature", np.float32), ("top_p", np.float32)),
        *(("has_stop", np.bool_), ("is_streamed", np.bool_)),
    ]
)
"""Numbers of a completion under way: ``position`` is that of its ``last`` token, ``count`` the tokens it has."""

STOP_SLACK = 16
"""Tokens, besides one for each character, in which a stop string is searched: some tokens have no character."""


@define
class EngineCounters:
    """Counts of what an engine has done since it was made."""

    steps: int = 0
    tokens: int = 0
    """Generated."""
    prompt_tokens: int = 0
    """Computed; a prompt that several completions share counts once."""
    forward_s: float = 0.0
    """Time in forward passes of the model."""
    step_s: float = 0.0
    """Time in steps: forward passes, sampling and bookkeeping."""


@define(eq=False)
class _Sequence:
    """A completion that waits or is under way."""

    request: GenerateRequest
    index: int
    key: int
    is_streamed: bool
    ends: tuple[int, ...]
    segments: list[Segment] = field(factory=list)
    in_segments: int = 0
    """Tokens that the segments count; later ones are of the current version."""
    top_logprobs: list[list[tuple[int, float]]] = field(factory=list)
    prompt_logprobs: list[float | None] = field(factory=list)
    top_prompt_logprobs: list[list[tuple[int, float]]] = field(factory=list)


class Engine:
    """Generates completions with one model.

    Rows 0 to ``running - 1`` of all arrays and of the cache are the completions under way.

    Args:
        lm: the model; `load` changes its weights in place.
        version: of its weights.
        slots: completions under way at a time; more wait. Keys and values are kept for this many, each as wide as the
            longest of them needs.
        max_length: tokens of a prompt and its response together; default: those of the model.
        prefill_tokens: tokens of prompts in one forward pass, padding included; a longer prompt has one of its own.
        adapters: of the model, for requests that name one.
        adapter: the one that answers requests that name none, and whose weights `load` replaces instead of the model's.
        clock: seconds, for the counters.

    Raises:
        ValueError: ``slots`` or ``max_length`` is out of range, or the engine cannot run this kind of model.
        KeyError: there is no such adapter.
    """

    def __init__(
        self,
        lm: LanguageModel,
        version: VersionName,
        *,
        slots: int = 64,
        max_length: int | None = None,
        prefill_tokens: int = 16_384,
        adapters: AdapterSet | None = None,
        adapter: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots}: expected at least 1")
        if max_length is not None and not 1 < max_length <= lm.max_length:
            raise ValueError(f"max_length={max_length}: expected 2 to {lm.max_length}, the context of the model")
        self.lm, self.version, self.slots = lm, version, slots
        self.max_length = max_length or lm.max_length
        self.busy = EngineCounters()
        # Looked up for every request and tensor: models and their configurations take microseconds to answer.
        self._vocabulary, self._device = lm.vocabulary_size, lm.device
        self._prefill_tokens, self._clock = prefill_tokens, clock
        self._adapters, self._adapter = adapters, adapter
        self._weights: flat_weights.Weights = lm.model
        if adapters is not None and adapter is not None:
            self._weights = adapters[adapter].tensors
        self._layer_types, self._window = _attention_of(lm.model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(lm.model.forward).parameters
        self._cache = SlotCache(lm.model.config.num_hidden_layers, slots, self.max_length)
        self._waiting: deque[_Sequence] = deque()
        self._open: dict[str, int] = {}
        self._sequences: list[_Sequence] = []
        self._rows = np.zeros(slots, ROW)
        self._ends = np.full((slots, max(1, len(lm.end_ids))), -1, np.int64)
        self._tokens = np.zeros((slots, 16), np.int64)
        self._logprobs = np.zeros((slots, 16), np.float32)

    @property
    def running(self) -> int:
        """Completions under way."""
        return len(self._sequences)

    @property
    def waiting(self) -> int:
        """Completions for which there was no slot yet."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._waiting)

    # Requests ---------------------------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest, *, stream: bool = False) -> None:
        """Take a request; its completions begin in the next step in which there are slots for them.

        Args:
            request: its ``sampling.n`` completions share the computation of the prompt.
            stream: each token is reported as a `TokenEvent`, too.

        Raises:
            ValueError: a request of this id is open, a token is outside the vocabulary, there is no such adapter, or
                prompt and ``max_tokens`` are longer than the context.
        """
        name, sampling = f"request {request.request_id!r}", request.sampling
        if request.adapter is not None and (self._adapters is None or request.adapter not in self._adapters):
            raise ValueError(f"{name}: there is no adapter {request.adapter!r} here")
        if request.request_id in self._open:
            raise ValueError(f"{name} is open already; each needs an id of its own")
        length, vocabulary = len(request.prompt_ids), self._vocabulary
        for what, tokens in (("prompt", request.prompt_ids), ("stop_token_ids", sampling.stop_token_ids)):
            for token in (min(tokens, default=0), max(tokens, default=0)):
                if not 0 <= token < vocabulary:
                    raise ValueError(
                        f"{name}: token {token} in its {what} is outside the vocabulary of {vocabulary} tokens"
                    )
        if length >= self.max_length:
            raise PromptTooLong(
                f"{name}: the prompt has {length} tokens; at most {self.max_length - 1} leave room for a response in "
                f"the context of {self.max_length}"
            )
        if length + sampling.max_tokens > self.max_length:
            raise ValueError(
                f"{name}: {length} tokens of prompt and max_tokens={sampling.max_tokens} are more than the context of "
                f"{self.max_length}; max_tokens may be {self.max_length - length} here"
            )
        for what, most in (("logprobs", sampling.logprobs), ("top_prompt_logprobs", sampling.top_prompt_logprobs)):
            if most > vocabulary:
                raise ValueError(f"{name}: {what}={most}, but the vocabulary has {vocabulary} tokens")
        ends = tuple({*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.lm.end_ids)})
        if sampling.min_tokens and len(ends) >= vocabulary:
            raise ValueError(f"{name}: min_tokens={sampling.min_tokens}, but every token ends the completion")
        self._open[request.request_id] = sampling.n
        seed = request.seed if sampling.seed is None else sampling.seed
        if seed is None:
            seed = secrets.randbits(64)
        for index in range(sampling.n):
            self._waiting.append(_Sequence(request, index, stream_key(seed, index), stream, ends))

    def cancel(self, request_id: str) -> bool:
        """End a request without an answer. Return False if none of this id is open."""
        if self._open.pop(request_id, None) is None:
            return False
        self._waiting = deque(each for each in self._waiting if each.request.request_id != request_id)
        self._remove([row for row, each in enumerate(self._sequences) if each.request.request_id == request_id])
        return True

    def abort_all(self) -> list[tuple[str, Completion]]:
        """End all requests; return what their completions have so far, with the finish reason ``abort``."""
        answers = self._finished([(row, "abort", None) for row in range(self.running)])
        waiting = [(each.request.request_id, Completion([], [], [], "abort", each.index)) for each in self._waiting]
        self._remove(range(self.running))
        self._waiting.clear()
        self._open.clear()
        return answers + waiting

    def load(self, version: VersionName, table: WeightTable | None, buffer: Any) -> None:
        """Load weights from a flat buffer; completions under way continue with them.

        Without a table, the weights stay, under the name of the version.

        The keys and values of their earlier tokens stay those of the earlier weights.

        Raises:
            ValueError: as `flat_weights.load`; version and weights are as before then.
        """
        if table is not None:
            flat_weights.load(self._weights, table, buffer)
        for sequence, count in zip(self._sequences, self._rows["count"].tolist(), strict=False):
            self._close_segment(sequence, count)
        self.version = version

    # A step -----------------------------------------------------------------------------------------------------------

    def step(self) -> list[Answer]:
        """Generate the next token of each completion under way, and the first of those that begin.

        Returns:
            Tokens of streams, and completions that have ended.
        """
        began = self._clock()
        with torch.inference_mode():
            logits = [self._decode()] if self._sequences else []
            if self._waiting and self.running < self.slots:
                logits.append(self._begin())
            if not logits:
                return []
            answers = self._append(torch.cat(logits))
        self.busy.steps += 1
        self.busy.step_s += self._clock() - began
        return answers

    def _decode(self) -> Tensor:
        """Return the logits after the last token of each row, `[running, vocabulary]`."""
        rows = self._rows[: self.running]
        positions = rows["position"]
        lowest, highest = int(positions.min()), int(positions.max())
        at = self._tensor(positions)
        self._cache.begin_tokens(at, lowest if lowest == highest else None, highest + 1)
        # Rows of one length attend to all columns, and transformers makes the mask, if one is needed.
        mask = None if lowest == highest else self._masks(at, highest + 1)
        with self._adapting(self._sequences):
            return self._forward(self._tensor(rows["last"])[:, None], at[:, None], mask, keep=1)[:, -1].float()

    def _adapting(self, sequences: Sequence[_Sequence]) -> AbstractContextManager[None]:
        """Select the adapter of each row of a forward pass."""
        if self._adapters is None:
            return nullcontext()
        return self._adapters.selected([each.request.adapter or self._adapter for each in sequences])

    def _begin(self) -> Tensor:
        """Put completions that wait into the free slots; return the logits after their prompts.

        Returns:
            `[begun, vocabulary]`, in the order of their rows.
        """
        begun = [self._waiting.popleft() for _ in range(min(len(self._waiting), self.slots - self.running))]
        return torch.cat([self._prefill(prompts) for prompts in self._passes(begun)])

    def _passes(self, begun: Sequence[_Sequence]) -> list[list[list[_Sequence]]]:
        """Return forward passes of prompts; each prompt is the completions that share it."""
        of_prompt: dict[tuple[bool, tuple[int, ...], str | None], list[_Sequence]] = {}
        for each in begun:
            request = each.request
            key = request.sampling.prompt_logprobs, request.prompt_ids, request.adapter
            of_prompt.setdefault(key, []).append(each)
        passes: list[list[list[_Sequence]]] = []
        needs_all = None
        # Prompts of similar lengths have little padding together; those whose logits are all needed are apart.
        for (needs, prompt, _), sequences in sorted(of_prompt.items(), key=lambda item: (item[0][0], len(item[0][1]))):
            if needs != needs_all or len(prompt) * (len(passes[-1]) + 1) > self._prefill_tokens:
                passes.append([])
            needs_all = needs
            passes[-1].append(sequences)
        return passes

    def _prefill(self, prompts: Sequence[Sequence[_Sequence]]) -> Tensor:
        """Compute prompts and give their completions the next rows; return the completions' logits."""
        texts = [of_prompt[0].request.prompt_ids for of_prompt in prompts]
        lengths = np.array([len(text) for text in texts])
        width = int(lengths[-1])
        padded = np.zeros((len(texts), width), np.int64)
        for row, text in enumerate(texts):
            padded[row, : len(text)] = text
        positions = torch.arange(width, device=self._device).expand(len(texts), width)
        needs_all = prompts[0][0].request.sampling.prompt_logprobs
        # Padding is on the right, where causal attention does not see it: no mask is needed. The logits of few places
        # are computed; for lengths that differ these are the last tokens of each length.
        places, at = np.unique(lengths - 1, return_inverse=True)
        keep = 0 if needs_all else 1 if len(places) == 1 else self._tensor(places)
        self._cache.begin_prompts()
        with self._adapting([of_prompt[0] for of_prompt in prompts]):
            logits = self._forward(self._tensor(padded), positions, None, keep)
        columns = at if logits.shape[1] == len(places) else lengths - 1
        last = logits[torch.arange(len(texts), device=logits.device), self._tensor(columns)].float()

        sources = self._tensor(np.repeat(np.arange(len(texts)), [len(of_prompt) for of_prompt in prompts]))
        self._cache.place_prompts(sources, self.running, width)
        self._cache.forget_prompts()
        self.busy.prompt_tokens += int(lengths.sum())
        if needs_all:
            self._keep_prompt_logprobs(logits, prompts)
        for of_prompt in prompts:
            for sequence in of_prompt:
                self._enter(sequence)
        return last[sources]

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Any, keep: int | Tensor) -> Tensor:
        """Return logits `[rows, kept tokens, vocabulary]` in the model's type; of all tokens if it cannot choose."""
        began = self._clock()
        kept = {"logits_to_keep": keep} if self._keeps_logits else {}
        output = self.lm.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache.of_model,
            use_cache=True,
            **kept,
        )
        if tokens.device.type == "cuda":
            torch.cuda.synchronize(tokens.device)
        self.busy.forward_s += self._clock() - began
        logits: Tensor = output.logits
        return logits

    def _masks(self, positions: Tensor, columns: int) -> Any:
        """Return what each row adds to the scores of its columns: 0 or minus infinity, `[rows, 1, 1, columns]`.

        For a model whose layers attend to different distances, a mask for each kind of layer.
        """
        at = torch.arange(columns, device=positions.device)
        hidden = at > positions[:, None]

        def mask_of(hidden: Tensor) -> Tensor:
            zeros = torch.zeros(hidden.shape, dtype=self.lm.model.dtype, device=hidden.device)
            return zeros.masked_fill_(hidden, -torch.inf)[:, None, None, :]

        if self._window is None or columns <= self._window:
            return mask_of(hidden)
        near = mask_of(hidden | (at <= positions[:, None] - self._window))
        if not self._layer_types:
            return near
        return {kind: near if kind == "sliding_attention" else mask_of(hidden) for kind in self._layer_types}

    def _append(self, logits: Tensor) -> list[Answer]:
        """Choose a token for each row; return what streams and completions that have ended are answered."""
        rows = self._rows[: self.running]
        sampling = RowSampling(
            keys=rows["key"],
            counts=rows["count"],
            temperature=rows["temperature"],
            top_p=rows["top_p"],
            top_k=rows["top_k"],
            min_tokens=rows["min_tokens"],
            ends=self._ends[: self.running],
        )
        chosen, of_chosen, of_all = choose(logits, sampling)
        tokens, logprobs = chosen.cpu().numpy(), of_chosen.cpu().numpy()
        count = rows["count"]
        if rows["top_logprobs"].any():
            self._keep_top_logprobs(of_all)
        at = np.arange(len(rows))
        self._tokens[at, count] = tokens
        self._logprobs[at, count] = logprobs
        rows["last"] = tokens
        rows["count"] += 1
        rows["position"] += 1
        self.busy.tokens += len(rows)

        answers: list[Answer] = []
        for row in np.flatnonzero(rows["is_streamed"]).tolist():
            of = self._sequences[row]
            token, logprob = int(tokens[row]), float(logprobs[row])
            answers.append(TokenEvent(of.request.request_id, of.index, token, logprob, self.version))
        ended = self._ended(tokens)
        answers += self._finished(ended)
        for row, _, _ in ended:
            request_id = self._sequences[row].request.request_id
            self._open[request_id] -= 1
            if not self._open[request_id]:
                del self._open[request_id]
        self._remove([row for row, _, _ in ended])
        return answers

    def _ended(self, tokens: Any) -> list[tuple[int, FinishReason, str | int | None]]:
        """Return the rows whose last token ended them, with the reason and what stopped them."""
        rows = self._rows[: self.running]
        stops: dict[int, str | int] = {}
        for row in np.flatnonzero(rows["has_stop"] & (rows["count"] >= rows["min_tokens"])).tolist():
            if (text := self._stop_string(row)) is not None:
                stops[row] = text
        # An end token before min_tokens is not chosen.
        for row in np.flatnonzero((self._ends[: self.running] == tokens[:, None]).any(axis=1)).tolist():
            stops[row] = int(tokens[row])
        full = np.flatnonzero(rows["count"] >= rows["max_tokens"]).tolist()
        ended: list[tuple[int, FinishReason, str | int | None]] = [(row, "stop", by) for row, by in stops.items()]
        ended += [(row, "length", None) for row in full if row not in stops]
        return sorted(ended, key=lambda each: each[0])

    def _stop_string(self, row: int) -> str | None:
        """Return the stop string that the last token of a row completed."""
        stop, count = self._sequences[row].request.sampling.stop, int(self._rows["count"][row])
        begin = max(0, count - max(map(len, stop)) - STOP_SLACK)
        tokens = self._tokens[row, begin:count].tolist()
        text = self.lm.tokenizer.decode(tokens)
        # A character of several tokens is a replacement character until its last one.
        before = len(self.lm.tokenizer.decode(tokens[:-1]).rstrip("\ufffd"))
        return next((each for each in stop if 0 <= text.rfind(each) > before - len(each)), None)

    # Rows -------------------------------------------------------------------------------------------------------------

    def _enter(self, sequence: _Sequence) -> None:
        """Give the next row to a completion whose prompt is in the cache."""
        row, sampling = self.running, sequence.request.sampling
        self._sequences.append(sequence)
        if (missing := len(sequence.ends) - self._ends.shape[1]) > 0:
            self._ends = np.pad(self._ends, ((0, 0), (0, missing)), constant_values=-1)
        while sampling.max_tokens > self._tokens.shape[1]:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, self._tokens.shape[1])))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, self._logprobs.shape[1])))
        self._ends[row] = -1
        self._ends[row, : len(sequence.ends)] = sequence.ends
        self._rows[row] = (
            *(len(sequence.request.prompt_ids) - 1, 0, sampling.max_tokens, sampling.min_tokens, 0),
            *(sampling.top_k, sampling.logprobs, sequence.key, sampling.temperature, sampling.top_p),
            *(bool(sampling.stop), sequence.is_streamed),
        )

    def _remove(self, removed: Sequence[int]) -> None:
        """Free rows; the last ones move into their places."""
        if not removed:
            return
        kept = self.running - len(removed)
        gone = set(removed)
        targets = [row for row in removed if row < kept]
        sources = [row for row in range(kept, self.running) if row not in gone]
        if sources:
            for array in (self._rows, self._ends, self._tokens, self._logprobs):
                array[targets] = array[sources]
            for source, target in zip(sources, targets, strict=True):
                self._sequences[target] = self._sequences[source]
            columns = int(self._rows["position"][:kept].max()) + 1
            self._cache.move(self._tensor(np.array(sources)), self._tensor(np.array(targets)), columns)
        del self._sequences[kept:]

    def _finished(self, ended: Sequence[tuple[int, FinishReason, str | int | None]]) -> list[tuple[str, Completion]]:
        """Return the completions of rows that end."""
        if not ended:
            return []
        at = [row for row, _, _ in ended]
        counts = self._rows["count"][at].tolist()
        tokens, logprobs = (array[at, : max(counts)].tolist() for array in (self._tokens, self._logprobs))
        answers = []
        for (row, reason, stopped_by), count, ids, of_ids in zip(ended, counts, tokens, logprobs, strict=True):
            of = self._sequences[row]
            self._close_segment(of, count)
            completion = Completion(
                ids[:count],
                of_ids[:count],
                of.segments,
                reason,
                of.index,
                stopped_by,
                of.top_logprobs,
                of.prompt_logprobs,
                of.top_prompt_logprobs,
            )
            answers.append((of.request.request_id, completion))
        return answers

    def _close_segment(self, sequence: _Sequence, count: int) -> None:
        """Note that the tokens since the last segment were made by the current version."""
        if count > sequence.in_segments:
            sequence.segments.append((self.version, count - sequence.in_segments))
            sequence.in_segments = count

    # Logprobs besides those of the chosen tokens ----------------------------------------------------------------------

    def _keep_top_logprobs(self, logprobs: Tensor) -> None:
        for row in np.flatnonzero(self._rows["top_logprobs"][: self.running]).tolist():
            values, tokens = logprobs[row].topk(int(self._rows["top_logprobs"][row]))
            self._sequences[row].top_logprobs.append(list(zip(tokens.tolist(), values.tolist(), strict=True)))

    def _keep_prompt_logprobs(self, logits: Tensor, prompts: Sequence[Sequence[_Sequence]]) -> None:
        for number, of_prompt in enumerate(prompts):
            text = self._tensor(np.array(of_prompt[0].request.prompt_ids[1:], np.int64))
            of_all = torch.log_softmax(logits[number, : len(text)].float(), dim=-1)
            logprobs = of_all.gather(1, text[:, None])[:, 0].tolist()
            for sequence in of_prompt:
                sequence.prompt_logprobs = [None, *logprobs]
            # Completions that share a prompt may be of requests that want different numbers.
            for most in {each.request.sampling.top_prompt_logprobs for each in of_prompt} - {0}:
                values, tokens = (of.tolist() for of in of_all.topk(most))
                top = [list(zip(*pair, strict=True)) for pair in zip(tokens, values, strict=True)]
                for sequence in of_prompt:
                    if sequence.request.sampling.top_prompt_logprobs == most:
                        sequence.top_prompt_logprobs = top

    def _tensor(self, array: Any) -> Tensor:
        return tensor_of(array, self._device)


def _attention_of(model: Any) -> tuple[frozenset[str], int | None]:
    """Return the kinds of a model's layers, if it names them, and the window of sliding ones.

    Raises:
        ValueError: the engine cannot run this kind of model.
    """
    name, config = type(model).__name__, model.config
    parameters = inspect.signature(model.forward).parameters
    if missing := {"position_ids", "past_key_values", "attention_mask"} - set(parameters):
        raise ValueError(
            f"{name} cannot be run by the engine: its forward pass does not take {', '.join(sorted(missing))}"
        )
    kinds = frozenset(getattr(config, "layer_types", None) or ())
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{name} cannot be run by the engine: it has layers of {', '.join(sorted(other))}; those of full "
            "and sliding attention can be run"
        )
    if model.config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"{name} was loaded with the attention {config._attn_implementation!r}; the engine needs 'sdpa' or 'eager'"
        )
    has_window = "sliding_attention" in kinds or not kinds
    return kinds, getattr(config, "sliding_window", None) if has_window else None
